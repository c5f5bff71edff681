"""Prometheus metrics of one gateway; `/metrics` merges them with its replicas'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric


class ModelFailures:
    """Counts failures of requests for one model.

    crashed:  a replica died while it worked on a request
    resumed:  another replica continued a stream
    """

    def __init__(self, crashes: Counter, resumed: Counter) -> None:
        self.crashed = crashes.inc
        self.resumed = resumed.inc


class GatewayMetrics:
    """The metrics of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._responses = self._counter(
            "responses", "HTTP responses of the gateway by status.", "status"
        )
        self._refusals = self._counter(
            "refusals",
            "Requests that the gateway refused, by the limit that they exceeded.",
            "limit",
        )
        self._crashes = self._counter(
            "crashes", "Replicas that died while they worked on a request.", "model_name"
        )
        self._resumed = self._counter(
            "resumed", "Streams that another replica continued.", "model_name"
        )
        self._late = self._counter(
            "late_errors", "Streams that the gateway ended with an error event."
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"remora_gateway_{name}", text, labels, registry=self._registry)

    def watch_held(self, held: Mapping[str, Callable[[], int]]) -> None:
        """Export the number of held requests of each model, by its name."""
        gauge = Gauge(
            "remora_gateway_held_requests",
            "Requests that the gateway holds until a replica is ready.",
            ("model_name",),
            registry=self._registry,
        )
        for name, num in held.items():
            gauge.labels(name).set_function(num)

    def count_response(self, _route: str, status: int) -> None:
        """Count one HTTP response."""
        self._responses.labels(str(status)).inc()

    def count_refusal(self, limit: str) -> None:
        """Count a request refused by a limit."""
        self._refusals.labels(limit).inc()

    def failures(self, model: str) -> ModelFailures:
        """Return the failure counters of one model."""
        return ModelFailures(self._crashes.labels(model), self._resumed.labels(model))

    def count_late_failure(self) -> None:
        """Count a stream that the gateway ended with an error event."""
        self._late.inc()

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        return self._registry.collect()

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)
