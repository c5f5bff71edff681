"""What one replica reports to the autoscaling policy.

Everything is taken from counters that exist anyway, as the difference between now and the oldest
look within the recent past: a token costs nothing extra. At most MAX_LOOKS looks are kept.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, Self

from remora.engine.types import EngineStats

if TYPE_CHECKING:
    from remora.deployments.http.generation.server_state import ServerState

MAX_LOOKS = 64
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Histogram(Protocol):
    """Counts of seconds, by ascending upper bounds; one count more than bounds."""

    bounds_s: tuple[float, ...]

    def counts(self) -> tuple[int, ...]:
        """Return the counts so far."""
        ...


@dataclass(frozen=True, slots=True)
class _Look:
    """What the counters said at one moment."""

    at: float
    stats: EngineStats
    counts: Mapping[str, tuple[int, ...]]


class LoadReporter:
    """Reports how one replica is doing.

    stats:       the engine's counters
    latencies:   by name (ttft, itl)
    look_back_s: the past that rates and percentiles are taken from
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        latencies: Mapping[str, Histogram],
        *,
        look_back_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stats = stats
        self._latencies = latencies
        self._look_back_s = look_back_s
        self._clock = clock
        self._looks: deque[_Look] = deque(maxlen=MAX_LOOKS)
        self._base_itl_s: float | None = None
        self._rates: dict[str, float] = {}
        self._busy_at = clock()
        self._num_steps: int | None = None

    @classmethod
    def of(cls, server: ServerState) -> Self:
        """Watch what a replica serves."""
        metrics = server.metrics
        return cls(
            server.client.stats,
            {"ttft": metrics.first_token, "itl": metrics.inter_token},
            look_back_s=server.config.autoscaling.look_back_s,
        )

    def report(self) -> dict[str, float]:
        """Return what is known, by the names of ReplicaLoad and a few more for people."""
        now, stats = self._clock(), self._stats()
        counts = {name: latency.counts() for name, latency in self._latencies.items()}
        self._keep(_Look(now, stats, counts))
        while len(self._looks) > 1 and self._looks[1].at <= now - self._look_back_s:
            self._looks.popleft()
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

    def _keep(self, look: _Look) -> None:
        """Keep a look; the last gives way where it is near the one before, so all is covered."""
        near_s = self._look_back_s / (MAX_LOOKS - 2)
        if len(self._looks) > 1 and self._looks[-1].at - self._looks[-2].at < near_s:
            self._looks.pop()
        self._looks.append(look)

    def _note_step(self, stats: EngineStats) -> None:
        """Remember the shortest step seen: one that made a token with nobody else there."""
        if stats.last_step_s > 0:
            self._base_itl_s = min(self._base_itl_s or stats.last_step_s, stats.last_step_s)

    def _note_busy(self, now: float, stats: EngineStats) -> None:
        """Remember when there was a request, also one that has come and gone between two looks."""
        has_stepped = self._num_steps is not None and stats.steps_total > self._num_steps
        self._num_steps = stats.steps_total
        if stats.num_running or stats.num_waiting or has_stepped:
            self._busy_at = now

    def _note_rates(self, stats: EngineStats) -> None:
        """Bring up to date what is done in a second of stepping; while idle, it stays known."""
        first = self._looks[0].stats
        busy_s = stats.step_time_total_s - first.step_time_total_s
        computed = _computed_tokens(stats) - _computed_tokens(first)
        finished = stats.finished_total - first.finished_total
        if busy_s > 0 and computed > 0:
            self._rates["tokens_per_s"] = computed / busy_s
        if busy_s > 0 and finished > 0:
            self._rates["finished_per_s"] = finished / busy_s

    def _percentiles(self) -> dict[str, float]:
        found = {}
        first, last = self._looks[0], self._looks[-1]
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
    """Return the value that `share` of the counted ones do not exceed, None if there are none.

    bounds_s:  [n] ascending; counts: [n + 1]

    Within two bounds the values are taken to lie evenly; what lies above all, at the last bound.
    """
    totals = list(accumulate(counts))
    if totals[-1] <= 0:
        return None
    rank = share * totals[-1]
    place = bisect_left(totals, rank)
    if place >= len(bounds_s):
        return bounds_s[-1]
    low = bounds_s[place - 1] if place else 0.0
    part = (rank - (totals[place] - counts[place])) / counts[place]
    return low + (bounds_s[place] - low) * part
