"""Logs throughput periodically, while there is any."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from remora.engine.types import EngineStats

log = logging.getLogger(__name__)


class StatsLog:
    """Logs the engine's work since the last line."""

    def __init__(
        self, stats: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stats = stats
        self._clock = clock
        self._last, self._at = stats(), clock()

    async def run(self, period_s: float) -> None:
        """Log a line per period."""
        while True:
            await asyncio.sleep(period_s)
            self.log_once()

    def log_once(self) -> None:
        """Log a line, unless the engine was idle."""
        before, last_at = self._last, self._at
        now, self._at = self._stats(), self._clock()
        self._last = now
        if now.steps_total == before.steps_total and not now.num_waiting:
            return
        seconds = max(self._at - last_at, 1e-9)
        prompt = now.prompt_tokens_total - before.prompt_tokens_total
        cached = now.cached_tokens_total - before.cached_tokens_total
        log.info(
            "throughput: prompt %.1f tokens/s, output %.1f tokens/s, running %d, waiting %d, "
            "KV cache usage %.1f %%, prefix cache hits %.1f %%, preempted %d",
            prompt / seconds,
            (now.generated_tokens_total - before.generated_tokens_total) / seconds,
            now.num_running,
            now.num_waiting,
            100 * now.kv_usage,
            100 * cached / max(prompt, 1),
            now.preemptions_total - before.preemptions_total,
        )
