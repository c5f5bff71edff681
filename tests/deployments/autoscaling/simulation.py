"""Replicas, a router and clients on a virtual clock, around the real policy and the real reports.

A new replica (replica_model.py) takes START_S to start. Only time, requests and the model's speed
are made up; what is reported, decided and remembered is done by the code that runs in earnest.
`PlainRequests` is Serve's own policy, for comparison.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from ray.serve.autoscaling_policy import _apply_delay_logic, _core_replica_queue_length_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from remora.deployments.autoscaling.slo_policy import SloPolicy
from tests.deployments.autoscaling.makers import make_context
from tests.deployments.autoscaling.replica_model import (
    ITL_S,
    LOOK_BACK_S,
    TICK_S,
    TTFT_S,
    Job,
    Replica,
)

REPORT_S, START_S = 1.0, 20.0
TARGETS: Mapping[str, Any] = {
    "requests": 18.0,
    "ttft_s": TTFT_S,
    "itl_s": ITL_S,
    "look_back_s": LOOK_BACK_S,
    "upscale_delay_s": 5.0,
    "downscale_delay_s": 60.0,
    "to_zero_delay_s": 120.0,
}
MISSES = 0.1  # of requests, of tokens: targets are 90th percentiles
SEVERAL = 4  # replicas, of which the capacity is measured beside that of one
Curve = Callable[[float], float]  # requests per second at a moment
Policy = Callable[[AutoscalingContext], tuple[int, dict[str, Any]]]


class PlainRequests:
    """Serve's default policy, with the same target and the same delays."""

    def __init__(self, targets: Mapping[str, Any] = TARGETS) -> None:
        self._config = AutoscalingConfig(
            min_replicas=0,
            max_replicas=64,
            target_ongoing_requests=targets["requests"],
            upscale_delay_s=targets["upscale_delay_s"],
            downscale_delay_s=targets["downscale_delay_s"],
            downscale_to_zero_delay_s=targets["to_zero_delay_s"],
        )

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        ctx.config = self._config
        wanted, _ = _core_replica_queue_length_policy(ctx)
        bounded = max(
            ctx.capacity_adjusted_min_replicas,
            min(math.ceil(wanted), ctx.capacity_adjusted_max_replicas),
        )
        decision: tuple[int, dict[str, Any]] = _apply_delay_logic(
            bounded, ctx.target_num_replicas, self._config, ctx.policy_state, ctx.current_time
        )
        return decision


@dataclass(eq=False)
class Run:
    """What happened.

    targets:  (second, replicas wanted from then on)
    samples:  (second, replicas ready, replicas needed), once a second
    """

    jobs: list[Job] = field(default_factory=list)
    targets: list[tuple[float, int]] = field(default_factory=list)
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)

    @property
    def slow(self) -> float:
        """Share of tokens that came too long after the one before."""
        total = sum(replica.num_tokens for replica in self.replicas)
        return sum(replica.num_slow_tokens for replica in self.replicas) / max(total, 1)

    @property
    def over(self) -> float:
        """Replica-seconds above the need, as a share of the need."""
        return self._share(lambda ready, needed: ready - needed)

    @property
    def under(self) -> float:
        """Replica-seconds missing, as a share of the need."""
        return self._share(lambda ready, needed: needed - ready)

    def _share(self, excess: Callable[[int, int], int]) -> float:
        total = sum(max(excess(ready, needed), 0) for _, ready, needed in self.samples)
        return total / max(sum(needed for _, _, needed in self.samples), 1)

    def late(self, since: float = 0.0, until: float = math.inf) -> float:
        """Return the share of requests that arrived in a time and waited too long."""
        jobs = [job for job in self.jobs if since <= job.arrived < until]
        return sum(job.is_late for job in jobs) / max(len(jobs), 1)

    @property
    def num_turns(self) -> int:
        """How often the target went the other way than before."""
        steps = [b - a for (_, a), (_, b) in pairwise(self.targets)]
        return sum(a * b < 0 for a, b in pairwise(steps))

    def target_at(self, second: float) -> int:
        return [number for at, number in self.targets if at <= second][-1]


class Simulation:
    """A deployment under a load curve."""

    def __init__(
        self,
        policy: Policy | None,
        *,
        low: int = 1,
        most: int = 10,
        initial: int | None = None,
        start_s: float = START_S,
        seed: int = 1,
    ) -> None:
        self._policy, self._low, self._most, self._start_s = policy, low, most, start_s
        self._random = random.Random(seed)
        self._now = 0.0
        self._state: dict[str, Any] = {}
        self._held: deque[Job] = deque()
        self._open_counts: deque[tuple[int, int]] = deque(maxlen=int(LOOK_BACK_S))
        self._target = low if initial is None else initial
        self._all: list[Replica] = []
        self._replicas = [self._start(0.0) for _ in range(self._target)]
        self._leaving: list[Replica] = []

    def _start(self, ready_at: float) -> Replica:
        self._all.append(Replica(len(self._all), ready_at, lambda: self._now))
        return self._all[-1]

    def run(self, curve: Curve, seconds: float) -> Run:
        """Let time pass."""
        run = Run(targets=[(0.0, self._target)], replicas=self._all)
        for tick in range(round(seconds / TICK_S)):
            self._now = tick * TICK_S
            for _ in range(self._num_arrivals(curve(self._now) * TICK_S)):
                run.jobs.append(Job(self._now))
                self._held.append(run.jobs[-1])
            self._route()
            for replica in self._ready + self._leaving:
                replica.step(self._now)
            if self._now % REPORT_S == 0:
                self._report()
                self._scale(run)
                needed = num_needed(curve(self._now)) if self._policy else 0
                needed = min(max(needed, self._low), self._most)
                run.samples.append((self._now, len(self._ready), needed))
        return run

    @property
    def _ready(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.ready_at <= self._now]

    def _num_arrivals(self, mean: float) -> int:
        """Draw from Poisson's distribution."""
        limit, product, count = math.exp(-mean), self._random.random(), 0
        while product > limit:
            product *= self._random.random()
            count += 1
        return count

    def _route(self) -> None:
        ready = self._ready
        while self._held and ready:
            min(ready, key=lambda replica: replica.num_open).waiting.append(self._held.popleft())

    def _report(self) -> None:
        for replica in self._ready:
            replica.report(self._now)
        held = len(self._held)
        self._open_counts.append((held + sum(r.num_open for r in self._replicas), held))

    def _scale(self, run: Run) -> None:
        if self._policy is None:
            return
        ctx = self._context()
        if not self._ready and ctx.total_num_requests > 0:  # Serve's fast path
            target = max(1, self._target)
        else:
            target, self._state = self._policy(ctx)
        target = min(max(target, self._low), self._most)
        if target != self._target:
            run.targets.append((self._now, target))
            self._target = target
        while len(self._replicas) < target:
            self._replicas.append(self._start(self._now + self._start_s))
        while len(self._replicas) > target:
            self._leaving.append(self._replicas.pop())
        self._leaving = [replica for replica in self._leaving if replica.num_open]

    def _context(self) -> AutoscalingContext:
        ready = self._ready
        names = {name for replica in ready for name in replica.series}
        metrics = {
            name: {replica.id: list(replica.series.get(name, ())) for replica in ready}
            for name in names
        }
        num = max(len(self._open_counts), 1)
        return make_context(
            [replica.id for replica in ready],
            metrics,
            target_num_replicas=self._target,
            total_num_requests=sum(count for count, _ in self._open_counts) / num,
            total_queued_requests=sum(held for _, held in self._open_counts) / num,
            capacity_adjusted_min_replicas=self._low,
            capacity_adjusted_max_replicas=self._most,
            policy_state=dict(self._state),
            current_time=self._now,
        )


def slo_policy(**changes: Any) -> SloPolicy:
    return SloPolicy(**{**TARGETS, **changes})


def num_needed(rate: float) -> int:
    """Return the replicas that serve so many requests per second within the targets."""
    if rate == 0:
        return 0
    one, several = capacity(1), capacity(SEVERAL)
    each = (several - one) / (SEVERAL - 1)  # together they even out chance, so more than one
    return 1 + max(math.ceil((rate - one) / each), 0)


@cache
def capacity(num_replicas: int = 1) -> float:
    """Return the requests per second that some replicas take within the targets (measured)."""
    low, high = 0.1, 3.0 * num_replicas
    for _ in range(8):
        middle = (low + high) / 2
        replicas = Simulation(None, low=num_replicas)
        run = replicas.run(lambda _, rate=middle: rate, 600)  # type: ignore[misc]
        low, high = (
            (middle, high) if max(run.late(until=590), run.slow) <= MISSES else (low, middle)
        )
    return low
