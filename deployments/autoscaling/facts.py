"""The numbers that a scaling decision is based on.

Does not know Ray, HTTP or the source of a number. An unknown number is None: a replica that has
just started has no latencies, one that hangs sends no reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

TINY, HUGE = 1e-9, 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The target load of a replica, and the delays before the number of replicas changes.

    requests:  running at one replica, at most
    ttft_s, itl_s:  at the 90th percentile; None = ignored
    look_back_s:  time window of latencies
    """

    requests: float
    kv_usage: float = 0.8
    ttft_s: float | None = None
    itl_s: float | None = None
    look_back_s: float = 10.0
    upscale_delay_s: float = 5.0
    downscale_delay_s: float = 120.0
    to_zero_delay_s: float = 300.0

    @property
    def wait_s(self) -> float:
        """Seconds that a request may wait in a queue."""
        return self.look_back_s if self.ttft_s is None else self.ttft_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The report of one replica; None = unknown.

    num_running, num_waiting:  sequences
    queued_tokens:     prompt tokens still to compute
    kv_usage:          0 to 1
    tokens_per_s, finished_per_s:  computed tokens and finished sequences per second of stepping
    ttft_p90_s, itl_p90_s:  90th percentiles within look_back_s
    base_itl_s:        shortest step seen: the time of a token without load
    idle_s:            since the last request; 0 while there is one
    """

    num_running: float | None = None
    num_waiting: float | None = None
    queued_tokens: float | None = None
    kv_usage: float | None = None
    tokens_per_s: float | None = None
    finished_per_s: float | None = None
    ttft_p90_s: float | None = None
    itl_p90_s: float | None = None
    base_itl_s: float | None = None
    idle_s: float | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return a report from values by name; invalid or negative ones are unknown."""
        return cls(**{name: known(values.get(name)) for name in LOAD_NAMES})


LOAD_NAMES = tuple(each.name for each in fields(ReplicaLoad))


def known(value: object) -> float | None:
    """Return a valid number as a float, and anything else as None.

    Valid is 0 to HUGE. A number below TINY becomes zero, so that division by any other stays
    finite.
    """
    if not isinstance(value, int | float) or not 0 <= value <= HUGE:
        return None
    return float(value) if value >= TINY else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The state of a deployment at one moment.

    now:              seconds on any clock that does not go back
    target:           wanted replicas; those not ready yet are starting
    num_ready:        replicas that take requests
    total_requests:   held, queued or running anywhere, averaged over look_back_s
    held_requests:    those without a replica yet
    replicas:         by name; only those whose report is recent
    """

    now: float
    target: int
    num_ready: int
    min_replicas: int
    max_replicas: int
    total_requests: float = 0.0
    held_requests: float = 0.0
    replicas: Mapping[str, ReplicaLoad] = field(default_factory=dict)

    @property
    def num_starting(self) -> int:
        """Replicas that are wanted and not ready yet."""
        return max(self.target - self.num_ready, 0)

    @property
    def loads(self) -> list[ReplicaLoad]:
        """The reports with a known load."""
        return [load for load in self.replicas.values() if load.num_running is not None]

    def total(self, value: Callable[[ReplicaLoad], float | None]) -> float:
        """Return a value's sum over all ready replicas; missing reports count as the mean."""
        values = known_values(map(value, self.loads))
        return sum(values) / len(values) * self.num_ready if values else 0.0

    def mean(self, value: Callable[[ReplicaLoad], float | None]) -> float | None:
        """Return a value's mean, weighted by running requests; None = unknown."""
        pairs = [
            (x, 1.0 + (load.num_running or 0.0))
            for load in self.loads
            if (x := value(load)) is not None
        ]
        weight = sum(w for _, w in pairs)
        return sum(x * w for x, w in pairs) / weight if pairs else None

    @property
    def has_requests(self) -> bool:
        """Whether a request is running or waiting."""
        busy = any((load.num_running or 0) + (load.num_waiting or 0) > 0 for load in self.loads)
        # Where all replicas report, other open requests make no tokens, such as /metrics.
        is_unseen = self.total_requests > 0 and len(self.loads) < max(self.num_ready, 1)
        return busy or is_unseen or self.held_requests > 0


def known_values(values: Iterable[float | None]) -> list[float]:
    """Return the known numbers."""
    return [value for value in values if value is not None]
