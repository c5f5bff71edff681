"""Repeats a process's metrics to Ray, whose agent on each node serves them to Prometheus.

Serve's proxy sends a scrape of /metrics to one replica of several, while Ray's agent reports all
processes of a node. Every sample becomes a gauge of Ray under its own name, with the absolute
value: exact also for histograms, whose sums Ray would estimate from buckets. Prometheus' functions
of counters and histograms do not depend on the declared type. Ray adds the prefix `ray_` and the
labels `deployment`, `replica` and `application`.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client.core import Metric

PERIOD_S = 5.0  # Ray's agent forgets a gauge that was not set for 20 s


class Gauge(Protocol):
    """A gauge of Ray."""

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        """Set the value of a series."""
        ...


MakeGauge = Callable[[str, str, tuple[str, ...]], Gauge]
"""Makes a gauge of a name, a description, and the names of its tags."""


class RayMetrics:
    """Reports metrics to Ray periodically.

    collect:     returns the metrics
    make_gauge:  makes a gauge of Ray
    """

    def __init__(
        self, collect: Callable[[], Iterable[Metric]], make_gauge: MakeGauge | None = None
    ) -> None:
        self._collect = collect
        self._make_gauge = make_gauge or _serve_gauge
        self._gauges: dict[tuple[str, tuple[str, ...]], Gauge] = {}

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            for metric in self._collect():
                self._report(metric)
                await asyncio.sleep(0)  # one metric at a time: requests come first
            await asyncio.sleep(PERIOD_S)

    def _report(self, metric: Metric) -> None:
        for sample in metric.samples:
            if sample.name.endswith("_created"):
                continue
            key = (sample.name, tuple(sample.labels))
            gauge = self._gauges.get(key)
            if gauge is None:
                name = re.sub("[^a-zA-Z0-9_]", "_", sample.name)
                gauge = self._make_gauge(name, metric.documentation, key[1])
                self._gauges[key] = gauge
            gauge.set(sample.value, tags=sample.labels)


def in_replica() -> bool:
    """Return whether this process is a replica of Ray Serve. Does not import Ray."""
    if "ray.serve" not in sys.modules:
        return False
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


def _serve_gauge(name: str, text: str, labels: tuple[str, ...]) -> Gauge:
    from ray.serve.metrics import Gauge as ServeGauge

    gauge: Gauge = ServeGauge(name, description=text, tag_keys=labels)
    return gauge
