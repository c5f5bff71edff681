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
from typing import Protocol

from remora.configs.errors import EngineError, StepTimeout
from remora.configs.planning.plan import EnginePlan
from remora.engine.scheduler.adapter_slots import AdapterSlots
from remora.engine.thread import EngineThread
from remora.engine.types import EngineStats, Request, SequenceOutput

logger = logging.getLogger(__name__)

WATCHDOG_PERIOD_S = 0.5


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
    """Runs an engine until closed or broken."""

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
        self.failure: EngineError | None = None
        self._thread = thread or EngineThread()
        self._watchdog = threading.Thread(target=self._watch, name="remora-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.end_with(self._run)
        if not self._thread.is_alive():
            self._thread.start()
        self._watchdog.start()

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
        self._closing.set()
        with self._wake:
            self._wake.notify()
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

    # -- the loop's thread -------------------------------------------------------------------

    def _run(self) -> None:
        """Step until closed. The outermost frame of the thread, so every exception ends here."""
        try:
            self._on_start()
            while not self._closing.is_set():
                self._run_commands()
                for _ in range(self._poll_interval_steps):
                    if self._engine.has_work and not self._closing.is_set():
                        self._step()
        except Exception as error:
            logger.exception("engine loop: failed")
            self.fail(
                error if isinstance(error, EngineError) else EngineError(f"A step failed: {error}")
            )
        finally:
            self._engine.close()

    def _run_commands(self) -> None:
        with self._wake:
            while not (self._commands or self._engine.has_work or self._closing.is_set()):
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

    def _watch(self) -> None:
        while not self._closing.wait(WATCHDOG_PERIOD_S) and self.failure is None:
            started = self._step_started
            age = 0.0 if started is None else time.monotonic() - started
            if age > self._step_timeout_s:
                self.fail(
                    StepTimeout(
                        f"A step has been running for {age:.1f} s; the limit"
                        f" (engine.step_timeout_s) is {self._step_timeout_s:g} s."
                    )
                )
