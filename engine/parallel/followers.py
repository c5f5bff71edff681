"""The other ranks as rank 0's runner sees them: it sends them steps and watches for failures."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from remora.configs.errors import EngineError, RankLost
from remora.engine.parallel.channel import read_message
from remora.engine.parallel.wire import (
    Failed,
    JoinGroup,
    encode_join_group,
    encode_logits,
    encode_step,
)
from remora.engine.types import IntArray, StepPlan, TokenArray

# A rank that lost a peer reports that at once; the peer's own failure may arrive a moment later.
FIRST_HAND_WAIT_S = 0.2
CAUSE_WAIT_S = 1.0
CLOSE_WAIT_S = 1.0


class Followers(Protocol):
    """Ranks that run rank 0's forward passes, without sampling."""

    def step(self, plan: StepPlan, rows: IntArray, token_ids: TokenArray) -> None:
        """Send a step, and the tokens that `rows` got in the step before."""

    def logits(self, first: int, last: int) -> None:
        """Announce the next call of `ForwardPass.logits`."""

    def cause_of(self, error: Exception) -> Exception:
        """Return the failure of a follower that caused an error, or the error itself."""

    def on_failure(self, callback: Callable[[EngineError], object]) -> None:
        """Call back once, from any thread, when a follower fails or if one has failed."""

    def close(self) -> None:
        """End the followers; further calls do nothing."""


class NoFollowers:
    """The Followers of a single rank."""

    def step(self, plan: StepPlan, rows: IntArray, token_ids: TokenArray) -> None:
        """Do nothing."""

    def logits(self, first: int, last: int) -> None:
        """Do nothing."""

    def cause_of(self, error: Exception) -> Exception:
        """Return `error`."""
        return error

    def on_failure(self, callback: Callable[[EngineError], object]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


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
        """Call back from the watching thread, or at once if a follower has failed."""
        with self._lock:
            self._on_failure = callback
            failure = self.failure
        if failure is not None:
            callback(failure)

    def join_group(self, host: str, port: int) -> None:
        """Let the followers join the tensor group. Raises EngineError when one is gone."""
        self._send(encode_join_group(JoinGroup(host, port)))

    def step(self, plan: StepPlan, rows: IntArray, token_ids: TokenArray) -> None:
        """Send the step. Raises EngineError when a follower is gone."""
        self._send(encode_step(plan, rows, token_ids))

    def logits(self, first: int, last: int) -> None:
        """Announce the call. Raises EngineError when a follower is gone."""
        self._send(encode_logits(first, last))

    def cause_of(self, error: Exception) -> Exception:
        """Return a follower's failure, for which it waits a moment, or `error`."""
        if isinstance(error, EngineError):  # a follower may be gone
            self._failed.wait(CAUSE_WAIT_S)
        return self.failure or error

    def close(self) -> None:
        """Close the connections, which ends the followers."""
        self._is_closed = True
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # unlike close, wakes the watcher
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
        lost = None if failed.second_hand else rank
        failure = RankLost(f"Rank {rank} has failed: {failed.reason}.", lost)
        with self._lock:
            self.failure = failure
            callback = self._on_failure
        self._failed.set()
        callback(failure)

    def _first_failure(self) -> tuple[int, Failed]:
        """Wait for the first failed rank, or for one that lost another, which counts less."""
        second_hand: tuple[int, Failed] | None = None
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while True:
                events = selector.select(None if second_hand is None else FIRST_HAND_WAIT_S)
                for key, _ in events:
                    rank, failed = key.data, _read_failure(self._connections[key.data])
                    if not failed.second_hand:
                        return rank, failed
                    second_hand = second_hand or (rank, failed)
                    selector.unregister(key.fileobj)
                if second_hand is not None and (not events or not selector.get_map()):
                    return second_hand


def _read_failure(connection: socket.socket) -> Failed:
    try:
        message = read_message(connection)
    except (OSError, ValueError) as error:
        return Failed(f"its connection broke: {error}")
    return message if isinstance(message, Failed) else Failed("its process has ended")
