"""The other ranks as rank 0's runner sees them: told of each step, watched all the time."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from remora.configs.errors import EngineError
from remora.engine.parallel.channel import read_message
from remora.engine.parallel.wire import (
    ComeIn,
    Failed,
    encode_come_in,
    encode_logits,
    encode_step,
)
from remora.engine.types import IntArray, StepPlan, TokenArray

# A rank that has lost another one says so at once; who was lost may be heard a moment later.
FIRST_HAND_WAIT_S = 0.2
BLAME_WAIT_S = 1.0
CLOSE_WAIT_S = 1.0


class Followers(Protocol):
    """Ranks that do what rank 0 does, all but choosing tokens."""

    def step(self, plan: StepPlan, rows: IntArray, token_ids: TokenArray) -> None:
        """Tell them of a step and of the tokens that the step before has given to `rows`."""
        ...

    def logits(self, first: int, last: int) -> None:
        """Tell them that `ForwardPass.logits` is called next."""
        ...

    def cause_of(self, error: Exception) -> Exception:
        """Return what is behind an error of the forward pass: a follower's, if one has failed."""
        ...

    def on_failure(self, callback: Callable[[EngineError], object]) -> None:
        """Call back, once and from any thread, when a follower fails; also if one has."""
        ...

    def close(self) -> None:
        """Let them go; further calls do nothing."""
        ...


class NoFollowers:
    """The Followers of a single rank."""

    def step(self, plan: StepPlan, rows: IntArray, token_ids: TokenArray) -> None:
        """Nobody to tell."""

    def logits(self, first: int, last: int) -> None:
        """Nobody to tell."""

    def cause_of(self, error: Exception) -> Exception:
        """Return `error`."""
        return error

    def on_failure(self, callback: Callable[[EngineError], object]) -> None:
        """Nobody fails."""

    def close(self) -> None:
        """Nobody to let go."""


class ChannelFollowers:
    """Followers behind sockets."""

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._connections = dict(connections)
        self._on_failure: Callable[[EngineError], object] = lambda error: None
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._is_closed = False
        self.failure: EngineError | None = None
        self._watcher = threading.Thread(target=self._watch, name="remora-followers", daemon=True)
        self._watcher.start()

    def on_failure(self, callback: Callable[[EngineError], object]) -> None:
        """Call back, from our own thread or at once if a follower has failed."""
        with self._lock:
            self._on_failure = callback
            failure = self.failure
        if failure is not None:
            callback(failure)

    def come_in(self, host: str, port: int) -> None:
        """Let them join the tensor group. Raises EngineError when a follower is gone."""
        self._send(encode_come_in(ComeIn(host, port)))

    def step(self, plan: StepPlan, rows: IntArray, token_ids: TokenArray) -> None:
        """Send the step. Raises EngineError when a follower is gone."""
        self._send(encode_step(plan, rows, token_ids))

    def logits(self, first: int, last: int) -> None:
        """Send the question. Raises EngineError when a follower is gone."""
        self._send(encode_logits(first, last))

    def cause_of(self, error: Exception) -> Exception:
        """Return the failure of a follower, which may be heard of a moment later, or `error`."""
        if isinstance(error, EngineError):  # somebody is missed
            self._failed.wait(BLAME_WAIT_S)
        return self.failure or error

    def close(self) -> None:
        """Hang up: the followers end."""
        self._is_closed = True
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the watcher, which a close does not
        if self._watcher is not threading.current_thread():
            self._watcher.join(CLOSE_WAIT_S)
        for connection in self._connections.values():
            connection.close()

    def _send(self, frame: bytes) -> None:
        if self.failure is not None:
            raise self.failure
        for rank, connection in self._connections.items():
            try:
                connection.sendall(frame)
            except OSError as error:
                raise self.cause_of(
                    EngineError(f"Rank {rank} cannot be reached: {error}.")
                ) from error

    # -- the watching thread -----------------------------------------------------------------

    def _watch(self) -> None:
        rank, failed = self._first_failure()
        if self._is_closed:
            return
        failure = EngineError(f"Rank {rank} has failed: {failed.reason}.")
        with self._lock:
            self.failure = failure
            callback = self._on_failure
        self._failed.set()
        callback(failure)

    def _first_failure(self) -> tuple[int, Failed]:
        """Wait for the first rank to fail of itself, or for one that says it has lost another."""
        hearsay: tuple[int, Failed] | None = None
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while True:
                events = selector.select(None if hearsay is None else FIRST_HAND_WAIT_S)
                for key, _ in events:
                    rank, failed = key.data, _read_failure(self._connections[key.data])
                    if not failed.second_hand:
                        return rank, failed
                    hearsay = hearsay or (rank, failed)
                    selector.unregister(key.fileobj)
                if hearsay is not None and (not events or not selector.get_map()):
                    return hearsay


def _read_failure(connection: socket.socket) -> Failed:
    try:
        message = read_message(connection)
    except (OSError, ValueError) as error:
        return Failed(f"its connection broke: {error}")
    return message if isinstance(message, Failed) else Failed("its process has ended")
