"""Log lines about steps.

Each class is a watcher of the engine (`Engine.watch`), called on its thread once per step, if
configured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from remora.engine.types import EngineStats, StepPlan, StepResult

logger = logging.getLogger(__name__)


class StatusLines:
    """Logs the engine's load every `every` decode steps."""

    def __init__(
        self,
        every: int,
        stats: Callable[[], EngineStats],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._stats = stats
        self._clock = clock
        self._num_steps = 0
        self._num_tokens = 0
        self._at = clock()

    def __call__(self, plan: StepPlan, result: StepResult) -> None:
        """Take in one step."""
        self._num_tokens += len(result.rows)
        if plan.num_tokens[0] > 1:  # decode rows come first: there are none
            return
        self._num_steps += 1
        if self._num_steps % self._every:
            return
        stats, now = self._stats(), self._clock()
        logger.info(
            "decode step %d: running %d, waiting %d, KV cache %.1f %%, %.1f tokens/s",
            self._num_steps,
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_usage,
            self._num_tokens / max(now - self._at, 1e-9),
        )
        self._num_tokens, self._at = 0, now


class StepTimes:
    """Logs the times of each step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._at = clock()

    def __call__(self, plan: StepPlan, result: StepResult) -> None:
        """Take in one step."""
        now = self._clock()
        logger.info(
            "step %d: rows %d, tokens %d, forward %.3f ms, sample %.3f ms, since the last %.3f ms",
            plan.step_id,
            len(plan.rows),
            int(plan.num_tokens.sum()),
            1000 * result.forward_s,
            1000 * result.sample_s,
            1000 * (now - self._at),
        )
        self._at = now
