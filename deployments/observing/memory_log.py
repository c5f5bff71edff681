"""Logs where Python's memory grows. Slow: for finding leaks."""

from __future__ import annotations

import asyncio
import logging
import tracemalloc

log = logging.getLogger(__name__)

NUM_SHOWN = 10


class MemoryLog:
    """Traces allocations until closed.

    num_frames:  callers shown for each allocation
    """

    def __init__(self, num_frames: int) -> None:
        tracemalloc.start(num_frames)

    async def run(self, period_s: float) -> None:
        """Log the growth of each period."""
        before = await asyncio.to_thread(_snapshot)
        while True:
            await asyncio.sleep(period_s)
            now = await asyncio.to_thread(_snapshot)
            await asyncio.to_thread(_log_growth, before, now)
            before = now

    def close(self) -> None:
        """Stop tracing."""
        tracemalloc.stop()


def _snapshot() -> tracemalloc.Snapshot:
    found = tracemalloc.take_snapshot()
    return found.filter_traces([tracemalloc.Filter(False, tracemalloc.__file__)])


def _log_growth(before: tracemalloc.Snapshot, now: tracemalloc.Snapshot) -> None:
    held, _ = tracemalloc.get_traced_memory()
    lines = []
    for change in now.compare_to(before, "traceback")[:NUM_SHOWN]:
        # Fewer spaces than code in a traceback, which terminals do not get.
        stack = "\n".join(f"   {line.strip()}" for line in change.traceback.format())
        lines.append(
            f"  {change.size_diff / 1024:+.1f} KiB, now {change.size / 1024:.1f} KiB in "
            f"{change.count} blocks\n{stack}"
        )
    log.info("memory: Python holds %.1f MiB, most changed:\n%s", held / 2**20, "\n".join(lines))
