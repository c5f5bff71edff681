"""Records of the engine's latest steps: a ring, bounded in number and age."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from remora.engine.types import EngineStats, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. `at` is in seconds since 1970; gauges are those before its outputs."""

    step_id: int
    at: float
    num_rows: int
    num_tokens: int
    num_sampled: int
    num_running: int
    num_waiting: int
    num_free_pages: int
    forward_s: float
    sample_s: float


class StepRecords:
    """A watcher of the engine that keeps a record of each step. Thread-safe to read.

    max_records:  most records kept
    window_s:     age limit of a record
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        *,
        max_records: int,
        window_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._stats = stats
        self._window_s = window_s
        self._clock = clock
        self._records: deque[StepRecord] = deque(maxlen=max_records)

    def __call__(self, plan: StepPlan, result: StepResult) -> None:
        """Take in one step."""
        stats = self._stats()
        self._records.append(
            StepRecord(
                step_id=plan.step_id,
                at=self._clock(),
                num_rows=len(plan.rows),
                num_tokens=int(plan.num_tokens.sum()),
                num_sampled=len(result.rows),
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                num_free_pages=stats.num_free_pages,
                forward_s=result.forward_s,
                sample_s=result.sample_s,
            )
        )

    def recent(self) -> list[dict[str, Any]]:
        """Return the records within the age limit, the oldest first."""
        since = self._clock() - self._window_s
        return [asdict(record) for record in tuple(self._records) if record.at >= since]
