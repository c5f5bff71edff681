"""A replica on a virtual clock: a queue before a batch, and the reports that a real one makes.

Prompts are computed one after the other; then every running sequence gets a token per step, whose
length grows with the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.serve._private.common import ReplicaID, TimeStampedValue

from remora.deployments.autoscaling.reports import LoadReporter
from remora.deployments.http.core.histograms import Latencies
from remora.engine.types import EngineStats
from tests.deployments.autoscaling.makers import DEPLOYMENT

TICK_S = 0.5
PROMPT_TOKENS, OUTPUT_TOKENS = 400, 100
SLOTS, KV_TOKENS = 24, 16_000
PREFILL_TOKENS_PER_S, STEP_S, STEP_S_PER_ROW = 4000.0, 0.02, 0.002
TTFT_S, ITL_S, LOOK_BACK_S = 2.0, 0.08, 10.0


@dataclass(slots=True, eq=False)
class Job:
    """One request."""

    arrived: float
    prompt_left: float = PROMPT_TOKENS
    output_left: float = OUTPUT_TOKENS
    first_at: float | None = None

    @property
    def is_late(self) -> bool:
        """Whether the first token took longer than it should."""
        return self.first_at is None or self.first_at - self.arrived > TTFT_S


@dataclass(eq=False)
class Replica:
    """One replica, ready from `ready_at` on."""

    number: int
    ready_at: float
    clock: Callable[[], float]
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    series: dict[str, deque[TimeStampedValue]] = field(default_factory=dict)
    num_tokens: int = 0
    num_slow_tokens: int = 0

    def __post_init__(self) -> None:
        self.id = ReplicaID(unique_id=f"r{self.number}", deployment_id=DEPLOYMENT)
        self._ttft = Latencies("ttft", "", "m", (1.0,))
        self._itl = Latencies("itl", "", "m", (1.0,))
        self._prompts = self._generated = self._step_s = 0.0
        self._finished = self._steps = 0
        self._last_step_s = STEP_S + STEP_S_PER_ROW  # as the warm-up leaves it
        self._reporter = LoadReporter(
            self.stats,
            {"ttft": self._ttft, "itl": self._itl},
            look_back_s=LOOK_BACK_S,
            clock=self.clock,
        )

    @property
    def num_open(self) -> int:
        return len(self.waiting) + len(self.running)

    def step(self, now: float) -> None:
        """Work through one tick that begins now."""
        left = TICK_S
        is_busy = self.num_open > 0
        while self.waiting and len(self.running) < SLOTS and left > 0:
            job = self.waiting[0]
            needed = min(job.prompt_left / PREFILL_TOKENS_PER_S, left)
            left -= needed
            job.prompt_left -= needed * PREFILL_TOKENS_PER_S
            self._prompts += needed * PREFILL_TOKENS_PER_S
            if job.prompt_left < 1e-6:
                job.first_at = now + TICK_S - left
                self._ttft.observe(job.first_at - job.arrived)
                self.running.append(self.waiting.popleft())
        if self.running and left > 0:
            self._decode(left)
        self._step_s += TICK_S * is_busy
        self._steps += is_busy

    def _decode(self, left: float) -> None:
        self._last_step_s = STEP_S + STEP_S_PER_ROW * len(self.running)
        tokens = left / self._last_step_s
        itl_s = TICK_S / tokens
        num_tokens = round(tokens * len(self.running))
        self._itl.observe(itl_s, num_tokens)
        self.num_tokens += num_tokens
        self.num_slow_tokens += num_tokens * (itl_s > ITL_S)
        self._generated += tokens * len(self.running)
        for job in self.running:
            job.output_left -= tokens
        self._finished += sum(job.output_left <= 0 for job in self.running)
        self.running = [job for job in self.running if job.output_left > 0]

    def stats(self) -> EngineStats:
        held = sum(PROMPT_TOKENS + OUTPUT_TOKENS - job.output_left for job in self.running)
        nothing: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        return EngineStats(
            **nothing
            | {
                "num_running": len(self.running),
                "num_waiting": len(self.waiting),
                "num_queued_tokens": int(sum(job.prompt_left for job in self.waiting)),
                "num_pages": KV_TOKENS,
                "num_free_pages": KV_TOKENS - int(held),
                "num_held_pages": int(held),
                "prompt_tokens_total": int(self._prompts),
                "generated_tokens_total": int(self._generated),
                "finished_total": self._finished,
                "steps_total": self._steps,
                "step_time_total_s": self._step_s,
                "last_step_s": self._last_step_s,
            }
        )

    def report(self, now: float) -> None:
        """Keep what the replica says of itself as long as Serve does."""
        for name, value in self._reporter.report().items():
            series = self.series.setdefault(name, deque())
            series.append(TimeStampedValue(now, value))
        for series in self.series.values():
            while series and series[0].timestamp < now - LOOK_BACK_S:
                series.popleft()
