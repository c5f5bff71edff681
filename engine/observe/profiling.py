"""Profiles a running engine: torch's profiler around some steps, written as a trace to a folder.

Everything but `start` and `stop` runs on the engine's thread: the profiler records the thread that
starts it, and devices.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

from remora.configs.errors import ConfigError, InvalidRequest
from remora.engine.loop import Stepping
from remora.engine.types import StepPlan, StepResult

logger = logging.getLogger(__name__)


Ask = Callable[[Callable[[Stepping], str | None]], Awaitable[str | None]]
"""Runs a function on the engine's thread between two steps, and returns its result."""


class Profiler:
    """A watcher of the engine that records profiles. Raises ConfigError if it cannot write.

    ask:  set by the owner of the engine's thread
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"debug.profile_dir: {folder}: {error.strerror}") from None
        self._folder = folder
        self._running: torch.profiler.profile | None = None
        self._num_left: int | None = None
        self._mark = torch.profiler.record_function("")
        self.ask: Ask | None = None

    async def start(self, num_steps: int | None) -> None:
        """Record from the next step on, for `num_steps`. Raises InvalidRequest if one runs."""
        if await self._asked(lambda _engine: self._begin(num_steps)) is None:
            raise InvalidRequest("A profile is being recorded already.", code="profile_running")

    async def stop(self) -> str:
        """Stop; returns the name of the trace. Raises InvalidRequest if none runs."""
        name = await self._asked(lambda _engine: self._end())
        if name is None:
            raise InvalidRequest("No profile is being recorded.", code="no_profile")
        return name

    def _asked(self, question: Callable[[Stepping], str | None]) -> Awaitable[str | None]:
        assert self.ask is not None, "the engine has no thread"
        return self.ask(question)

    # -- the engine's thread -----------------------------------------------------------------

    def __call__(self, plan: StepPlan, result: StepResult) -> None:
        """Mark the end of one step."""
        if self._running is None:
            return
        self._mark.__exit__(None, None, None)
        self._mark = _mark(plan.step_id + 1)
        if self._num_left is not None:
            self._num_left -= 1
            if self._num_left == 0:
                self._end()

    def _begin(self, num_steps: int | None) -> str | None:
        if self._running is not None:
            return None
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(activities=activities)
        self._num_left = num_steps
        self._running.start()
        self._mark = _mark("begun with")
        return ""

    def _end(self) -> str | None:
        profile, self._running = self._running, None
        if profile is None:
            return None
        self._mark.__exit__(None, None, None)
        profile.stop()
        name = f"steps-{time.time():.6f}.trace.json"
        try:
            profile.export_chrome_trace(str(self._folder / name))
        except (OSError, RuntimeError) as error:
            logger.error("profiler: cannot write %s: %s", name, error)
        else:
            logger.info("profiler: wrote %s", self._folder / name)
        return name


def _mark(step: int | str) -> torch.profiler.record_function:
    """Begin a mark in the trace that covers one step and the wait for it."""
    mark = torch.profiler.record_function(f"step {step}")
    mark.__enter__()  # type: ignore[no-untyped-call]
    return mark
