"""The engine's thread and its watchdog thread.

The loop runs submitted commands between steps, steps while there is work, sleeps otherwise, and
delivers each step's outputs in one call. Knows no asyncio: `deliver` is called on the loop's thread
and `on_failure` on any thread; the caller switches threads itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from remora.configs.errors import EngineError, StepTimeout
from remora.configs.planning.plan import EnginePlan
from remora.engine.scheduler.adapter_slots import AdapterSlots
from remora.engine.thread import EngineThread
from remora.engine.types import EngineStats, Request, SequenceOutput

logger = logging.getLogger(__name__)

WATCHDOG_PERIOD_S = 0.5

T = TypeVar("T")


class Stepping(Protocol):
    """The engine that a loop runs: `Engine`, which documents these methods, or `PoolingEngine`."""

    plan: EnginePlan

    @property
    def adapters(self) -> AdapterSlots:
        """Adapters by slot."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""

    def check(self, request: Request) -> None:
        """Raise RequestError if the request can never run. Thread-safe."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `check` raises."""

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        """End a request, or one of its sequences."""

    def is_waiting(self, request_id: str) -> bool:
        """Return whether all sequences of an open request are waiting."""

    def step(self) -> list[SequenceOutput]:
        """Run one step."""

    def flush_cache(self) -> bool:
        """Drop the prefix cache; returns False, and keeps it, while sequences are open."""

    def page_hashes(self, limit: int) -> bytes:
        """Return the hashes of up to `limit` cached pages."""

    def pause(self, *, retracting: bool) -> list[SequenceOutput]:
        """Finish the step in flight; with `retracting`, let running sequences wait again."""

    def unpause(self) -> None:
        """Take in that there were no steps for a time."""

    def hold(self) -> None:
        """Hold new requests back until `go_on`."""

    def go_on(self) -> None:
        """Queue the held requests."""

    def stats(self) -> EngineStats:
        """Return the counters as of the last step."""

    def close(self) -> None:
        """Stop threads and ranks."""


Command = Callable[[Stepping], object]


class EngineLoop:
    """Runs an engine until closed or broken.

    is_paused:     whether it takes no steps, only commands; changed by commands only
    keeps_engine:  whether the engine stays open after a failure, for `resume`
    """

    def __init__(
        self,
        engine: Stepping,
        *,
        deliver: Callable[[list[SequenceOutput]], None],
        on_failure: Callable[[EngineError], None],
        step_timeout_s: float,
        on_start: Callable[[], None] = lambda: None,
        poll_interval_steps: int = 1,
        thread: EngineThread | None = None,
    ) -> None:
        """Begin without steps.

        thread:               that built the engine, which the loop takes over; None = a new one
        poll_interval_steps:  steps after which commands are run while there is work
        """
        self._engine = engine
        self._deliver = deliver
        self._on_failure = on_failure
        self._step_timeout_s = step_timeout_s
        self._on_start = on_start
        self._poll_interval_steps = poll_interval_steps
        self._commands: deque[tuple[Command, Callable[[], object] | None]] = deque()
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._step_started: float | None = None
        self._stats = engine.stats()
        self.keeps_engine = False
        self.is_paused = False
        self.failure: EngineError | None = None
        self._is_closed = False
        self._thread = thread or EngineThread()

    def start(self) -> None:
        """Begin to step."""
        self._begin()
        if not self._thread.is_alive():
            self._thread.start()

    def resume(self) -> None:
        """Step again after a failure, beginning with the commands submitted since.

        Only with `keeps_engine`, and once the engine has been repaired.
        """
        with self._wake:
            if self._is_closed:
                return
            self.failure = None
            self._closing = threading.Event()  # the former watchdog may not have seen the old one
            self._step_started = None
        self._begin()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the loop's thread once a failure has stopped the loop.

        Raises EngineError after `close`.
        """
        if self._is_closed:
            raise EngineError("The engine was closed.")
        return self._thread.call(function)

    def submit(self, command: Command, then: Callable[[], object] | None = None) -> None:
        """Run `command` on the loop's thread before the next step, then `then` with new stats."""
        with self._wake:
            self._commands.append((command, then))
            self._wake.notify()

    def stats(self) -> EngineStats:
        """Return the counters as of the last step or command."""
        return self._stats

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after the step in progress and close the engine."""
        with self._wake:
            is_at_rest = self.failure is not None and self.keeps_engine and not self._is_closed
            self._is_closed = True
            self._closing.set()
            self._wake.notify()
        if is_at_rest:
            self._thread.end_with(self._engine.close)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        self.fail(EngineError("The engine was closed."))

    def fail(self, error: EngineError) -> None:
        """Stop because of an error; the first one counts. Thread-safe, also during a step."""
        with self._wake:
            if self.failure is not None:
                return
            self.failure = error
            self._closing.set()
            self._wake.notify()
        self._on_failure(error)

    def _begin(self) -> None:
        self._thread.call(self._run)
        watchdog = threading.Thread(
            target=self._watch, args=(self._closing,), name="remora-watchdog", daemon=True
        )
        watchdog.start()

    # -- the loop's thread -------------------------------------------------------------------

    def _run(self) -> None:
        """Step until closed. The outermost frame of the loop, so every exception ends here."""
        try:
            self._on_start()
            while not self._closing.is_set():
                self._run_commands()
                for _ in range(self._poll_interval_steps):
                    if self._may_step and not self._closing.is_set():
                        self._step()
        except Exception as error:
            logger.exception("engine loop: failed")
            self.fail(
                error if isinstance(error, EngineError) else EngineError(f"A step failed: {error}")
            )
        finally:
            with self._wake:
                is_kept = self.keeps_engine and not self._is_closed
            if not is_kept:
                self._thread.end_with(self._engine.close)

    @property
    def _may_step(self) -> bool:
        return self._engine.has_work and not self.is_paused

    def _run_commands(self) -> None:
        with self._wake:
            while not (self._commands or self._may_step or self._closing.is_set()):
                self._wake.wait()
            commands = list(self._commands)
            self._commands.clear()
        for command, _ in commands:
            command(self._engine)
        if commands:
            self._stats = self._engine.stats()
        for _, then in commands:
            if then is not None:
                then()

    def _step(self) -> None:
        self._step_started = time.monotonic()
        outputs = self._engine.step()
        self._step_started = None
        self._stats = self._engine.stats()
        if outputs:
            self._deliver(outputs)

    # -- the watchdog's thread ---------------------------------------------------------------

    def _watch(self, closing: threading.Event) -> None:
        while not closing.wait(WATCHDOG_PERIOD_S):
            started = self._step_started
            age = 0.0 if started is None else time.monotonic() - started
            if age > self._step_timeout_s:
                self.fail(
                    StepTimeout(
                        f"A step has been running for {age:.1f} s; the limit"
                        f" (engine.step_timeout_s) is {self._step_timeout_s:g} s."
                    )
                )
