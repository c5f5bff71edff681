"""The engine's own thread, and the watchdog beside it.

Others hand it commands; it runs them between steps, steps while there is work, sleeps otherwise,
and passes on each step's outputs in one call. Knows no asyncio: `deliver` is called on the loop's
thread and `on_failure` on any, and crossing over is the caller's business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from remora.configs.errors import EngineError, StepTimeout
from remora.engine.engine import Engine
from remora.engine.types import EngineStats, SequenceOutput

logger = logging.getLogger(__name__)

Command = Callable[[Engine], object]
WATCHDOG_PERIOD_S = 0.5


class EngineLoop:
    """Runs an Engine until closed or broken."""

    def __init__(
        self,
        engine: Engine,
        *,
        deliver: Callable[[list[SequenceOutput]], None],
        on_failure: Callable[[EngineError], None],
        step_timeout_s: float,
        on_start: Callable[[], None] = lambda: None,
        poll_interval_steps: int = 1,
    ) -> None:
        """Begin without steps.

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
        self._thread = threading.Thread(target=self._run, name="remora-engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="remora-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()
        self._watchdog.start()

    def submit(self, command: Command, then: Callable[[], object] | None = None) -> None:
        """Run `command` on the loop's thread, before the next step; `then`, once stats show it."""
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
        """Stop for a reason, the first one counts; from any thread, also amid a step."""
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
            logger.exception("the engine loop has failed")
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
