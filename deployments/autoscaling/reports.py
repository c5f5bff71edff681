"""The load reports of one replica for the autoscaling policy.

Rates and percentiles are differences between the counters now and those of the oldest sample within
the time window, so tokens cost nothing extra. At most MAX_SAMPLES samples are kept.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Self

from remora.engine.types import EngineStats

if TYPE_CHECKING:
    from remora.deployments.http.core.histograms import Latencies
    from remora.deployments.http.generation.server_state import ServerState

MAX_SAMPLES = 64
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class _Sample:
    """The counters at one moment."""

    at: float
    stats: EngineStats
    counts: Mapping[str, tuple[int, ...]]


class LoadReporter:
    """Reports the load of one replica.

    stats:       the engine's counters
    latencies:   by name (ttft, itl)
    look_back_s: time window of rates and percentiles
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        latencies: Mapping[str, Latencies],
        *,
        look_back_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stats = stats
        self._latencies = latencies
        self._look_back_s = look_back_s
        self._clock = clock
        self._samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)
        self._base_itl_s: float | None = None
        self._rates: dict[str, float] = {}
        self._busy_at = clock()
        self._num_steps: int | None = None

    @classmethod
    def of(cls, server: ServerState) -> Self:
        """Return the reporter of a replica."""
        metrics = server.metrics
        return cls(
            server.client.stats,
            {"ttft": metrics.first_token, "itl": metrics.inter_token},
            look_back_s=server.config.autoscaling.look_back_s,
        )

    def report(self) -> dict[str, float]:
        """Return the known values, by the names of ReplicaLoad and some for operators."""
        now, stats = self._clock(), self._stats()
        counts = {name: latency.counts() for name, latency in self._latencies.items()}
        self._keep(_Sample(now, stats, counts))
        while len(self._samples) > 1 and self._samples[1].at <= now - self._look_back_s:
            self._samples.popleft()
        self._note_step(stats)
        self._note_busy(now, stats)
        self._note_rates(stats)
        return {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "queued_tokens": stats.num_queued_tokens,
            "kv_usage": stats.kv_usage,
            "last_step_s": stats.last_step_s,
            "idle_s": now - self._busy_at,
            **({} if self._base_itl_s is None else {"base_itl_s": self._base_itl_s}),
            **self._rates,
            **self._percentiles(),
        }

    def _keep(self, sample: _Sample) -> None:
        """Keep a sample; it replaces the last one if that is too close to the one before."""
        near_s = self._look_back_s / (MAX_SAMPLES - 2)
        if len(self._samples) > 1 and self._samples[-1].at - self._samples[-2].at < near_s:
            self._samples.pop()
        self._samples.append(sample)

    def _note_step(self, stats: EngineStats) -> None:
        """Record the shortest step seen: the time of a token without load."""
        if stats.last_step_s > 0:
            self._base_itl_s = min(self._base_itl_s or stats.last_step_s, stats.last_step_s)

    def _note_busy(self, now: float, stats: EngineStats) -> None:
        """Record when there was a request, including one that ended between two samples."""
        has_stepped = self._num_steps is not None and stats.steps_total > self._num_steps
        self._num_steps = stats.steps_total
        if stats.num_running or stats.num_waiting or has_stepped:
            self._busy_at = now

    def _note_rates(self, stats: EngineStats) -> None:
        """Update the rates per second of stepping; while idle they keep their values."""
        first = self._samples[0].stats
        busy_s = stats.step_time_total_s - first.step_time_total_s
        computed = _computed_tokens(stats) - _computed_tokens(first)
        finished = stats.finished_total - first.finished_total
        if busy_s > 0 and computed > 0:
            self._rates["tokens_per_s"] = computed / busy_s
        if busy_s > 0 and finished > 0:
            self._rates["finished_per_s"] = finished / busy_s

    def _percentiles(self) -> dict[str, float]:
        found = {}
        first, last = self._samples[0], self._samples[-1]
        for name, latency in self._latencies.items():
            recent = [b - a for a, b in zip(first.counts[name], last.counts[name], strict=True)]
            for suffix, share in PERCENTILES.items():
                value = percentile(latency.bounds_s, recent, share)
                if value is not None:
                    found[f"{name}_{suffix}_s"] = value
        return found


def _computed_tokens(stats: EngineStats) -> int:
    return stats.prompt_tokens_total - stats.cached_tokens_total + stats.generated_tokens_total


def percentile(bounds_s: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return the percentile of a histogram, None if it is empty.

    bounds_s:  [n] ascending; counts: [n + 1]

    Interpolates linearly between bounds; values above all bounds count as the last bound.
    """
    totals = list(accumulate(counts))
    if totals[-1] <= 0:
        return None
    rank = share * totals[-1]
    index = bisect_left(totals, rank)
    if index >= len(bounds_s):
        return bounds_s[-1]
    low = bounds_s[index - 1] if index else 0.0
    part = (rank - (totals[index] - counts[index])) / counts[index]
    return low + (bounds_s[index] - low) * part
