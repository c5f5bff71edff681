"""What scheduling costs with a long queue and a large prefix tree; no model, one thread.

    python tests/benchmarks/scheduler.py

Prints milliseconds of `Scheduler.schedule` per step while 1,000 requests wait and the tree holds
100,000 tokens.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, not by pytest

from remora.engine.engine import Engine
from remora.engine.scheduler.scheduler import Scheduler
from remora.engine.types import Request, SamplingParams, StepPlan, StepResult
from tests.engine.fakes import make_plan

TREE_TOKENS, NUM_WAITING, ENOUGH = 100_000, 1000, 100


class InstantRunner:
    """Answers every row with the same token."""

    def begin(self, plan: StepPlan) -> None:
        self.plan = plan

    def sample(self, ended: Collection[int] = ()) -> None:
        pass

    def finish(self) -> StepResult:
        rows = self.plan.rows[self.plan.samples]
        return StepResult(
            step_id=self.plan.step_id, rows=rows, token_ids=np.full(len(rows), 7, np.int64)
        )

    def close(self) -> None:
        pass


class Load:
    """An engine without a model, and random requests for it."""

    def __init__(self) -> None:
        plan = make_plan(
            page_size=16,
            num_pages=12_000,
            max_model_len=8192,
            max_running_requests=64,
            max_step_tokens=512,
            prefill_chunk_tokens=512,
            max_queued_requests=2000,
        )
        self.engine = Engine(plan, InstantRunner(), eos_token_ids=(0,), vocab_size=50_000)
        self._numbers = random.Random(0)
        self._num_added = 0

    def add(self, num_prompt: int, num_output: int) -> None:
        self._num_added += 1
        self.engine.add(
            Request(
                request_id=str(self._num_added),
                prompt_ids=[self._numbers.randrange(1, 40_000) for _ in range(num_prompt)],
                sampling=SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True),
            )
        )


def measure() -> list[float]:
    """Return the seconds of each call of `schedule`, while the queue is long."""
    load = Load()
    while load.engine.stats().num_cached_pages * 16 < TREE_TOKENS:
        load.add(500, 4)
        while load.engine.has_work:
            load.engine.step()
    for _ in range(NUM_WAITING):
        load.add(256, 64)
    seconds: list[float] = []
    schedule = Scheduler.schedule

    def timed(scheduler: Scheduler, *, admitting: bool = True) -> StepPlan | None:
        started = time.perf_counter()
        plan = schedule(scheduler, admitting=admitting)
        seconds.append(time.perf_counter() - started)
        return plan

    setattr(Scheduler, "schedule", timed)  # noqa: B010 - types allow no assignment here
    while load.engine.stats().num_waiting > ENOUGH:
        load.engine.step()
    return seconds


if __name__ == "__main__":
    times = np.array(measure()) * 1000
    p50, p99 = np.percentile(times, [50, 99])
    sys.stdout.write(
        f"{len(times)} steps: p50 {p50:.3f}, p99 {p99:.3f}, max {times.max():.3f} ms\n"
    )
