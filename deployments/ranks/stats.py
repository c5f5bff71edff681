"""Counters of each rank of a replica, and their metrics, labelled by rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Self

import psutil  # type: ignore[import-untyped]
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats:
    """Counters of one rank's process.

    step_time_total_s:  in forward passes; at rank 0 in whole steps
    """

    steps_total: int
    step_time_total_s: float
    cpu_time_total_s: float
    resident_bytes: int

    @classmethod
    def here(cls, *, num_steps: int, step_time_s: float) -> Self:
        """Return the counters of this process."""
        process = psutil.Process()
        times = process.cpu_times()
        return cls(
            steps_total=num_steps,
            step_time_total_s=step_time_s,
            cpu_time_total_s=times.user + times.system,
            resident_bytes=process.memory_info().rss,
        )


_SHOWN = {
    "steps_total": ("steps_total", "Engine steps that a rank has taken part in."),
    "step_time_total_s": (
        "step_seconds_total",
        "Time of a rank in forward passes; of rank 0 in whole engine steps.",
    ),
    "cpu_time_total_s": ("cpu_seconds_total", "CPU time of a rank's process."),
    "resident_bytes": ("resident_bytes", "Resident memory of a rank's process."),
}


class RankCollector(Collector):
    """Exports the counters of all ranks.

    stats:  returns them by rank
    """

    def __init__(self, stats: Callable[[], Mapping[int, RankStats]], model: str) -> None:
        self._stats = stats
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """Yield a metric for each counter."""
        ranks = {rank: asdict(stats) for rank, stats in self._stats().items()}
        for field, (name, text) in _SHOWN.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(f"remora_rank_{name}", text, labels=["model_name", "rank"])
            for rank, values in sorted(ranks.items()):
                metric.add_metric([self._model, str(rank)], values[field])
            yield metric
