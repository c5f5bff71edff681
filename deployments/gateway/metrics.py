"""Prometheus metrics of one gateway; `/metrics` merges them with its replicas'."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


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
        self._responses = self._counter("responses", "HTTP responses by status.", "status")
        self._refusals = self._counter("refusals", "Requests refused, by limit.", "limit")
        self._crashes = self._counter("crashes", "Replicas that died over a request.", "model_name")
        self._resumed = self._counter("resumed", "Streams continued elsewhere.", "model_name")
        self._late = self._counter("late_errors", "Streams that ended with an error event.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"remora_gateway_{name}", text, labels, registry=self._registry)

    def watch_held(self, held: Mapping[str, Callable[[], int]]) -> None:
        """Export the number of held requests of each model, by its name."""
        gauge = Gauge(
            "remora_gateway_held_requests",
            "Requests that wait for a first replica.",
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

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)
