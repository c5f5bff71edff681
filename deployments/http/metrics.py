"""Prometheus counters of one replica.

What the engine counts is read from its statistics at scrape time; what only the HTTP side knows
(statuses, finish reasons, latencies as a caller feels them) is observed here. One registry per
application, so that several can live in one process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from remora.deployments.parsers.faults import CallFault
from remora.engine.types import EngineStats

if TYPE_CHECKING:
    from remora.engine.grammar.service import GrammarStats

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# Counted in finer steps than shown, from half a millisecond to five minutes: percentiles taken
# from the counts (deployments/autoscaling) are off by a tenth at most, for nothing per token.
_FINE_S = tuple(0.0005 * 2 ** (step / 8) for step in range(155))


class StatsCollector(Collector):
    """Shows statistics by their names: `*_total` as counters, the others as gauges.

    source:  what they are of; stands in their names, but for the engine's
    """

    def __init__(
        self, stats: Callable[[], Mapping[str, float]], model: str, *, source: str = "engine"
    ) -> None:
        self._stats = stats
        self._model = model
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """Yield the newest values."""
        prefix = "remora_" if self._source == "engine" else f"remora_{self._source}_"
        for name, value in self._stats().items():
            is_total = name.endswith(("_total", "_total_s"))
            family = CounterMetricFamily if is_total else GaugeMetricFamily
            # Prometheus spells seconds out, and counters end in _total.
            shown = name.replace("_total_s", "_seconds_total").replace("step_s", "step_seconds")
            text = f"{self._source.capitalize()}: {name}."
            metric = family(f"{prefix}{shown}", text, labels=["model_name"])
            metric.add_metric([self._model], value)
            yield metric


def _values_of(stats: EngineStats) -> Mapping[str, float]:
    return {**asdict(stats), "kv_usage": stats.kv_usage}


class Latencies(Collector):
    """A histogram of seconds. Noting one is a search and two additions: it happens per token.

    bounds_s:  [num_bounds] upper ends of what is counted together, ascending
    """

    def __init__(self, name: str, text: str, model: str, shown_s: tuple[float, ...]) -> None:
        self._name, self._text, self._model = name, text, model
        self._shown_s = shown_s
        self.bounds_s = tuple(sorted({*shown_s, *_FINE_S}))
        self._counts = [0] * (len(self.bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, num: int = 1) -> None:
        """Note `num` times the same."""
        self._counts[bisect_left(self.bounds_s, seconds)] += num
        self._sum_s += seconds * num

    def counts(self) -> tuple[int, ...]:
        """Return how many were noted up to each bound and above the one before, and above all."""
        return tuple(self._counts)

    def collect(self) -> Iterable[Metric]:
        """Yield the histogram."""
        metric = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        totals = list(accumulate(self._counts))
        shown = [(str(s), totals[bisect_left(self.bounds_s, s)]) for s in self._shown_s]
        buckets = [*shown, ("+Inf", totals[-1])]
        metric.add_metric([self._model], buckets, self._sum_s)
        yield metric


class Metrics:
    """The counters and histograms of one application."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        model: str,
        *,
        grammar_stats: Callable[[], GrammarStats],
        adapter_stats: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(StatsCollector(lambda: _values_of(stats()), model))
        self.registry.register(
            StatsCollector(lambda: asdict(grammar_stats()), model, source="grammar")
        )
        self.registry.register(StatsCollector(adapter_stats, model, source="lora"))
        self._model = model
        self._responses = Counter(
            "remora_http_responses",
            "HTTP responses by route and status; 499 = the client had gone.",
            ("model_name", "route", "status"),
            registry=self.registry,
        )
        self._finished = Counter(
            "remora_sequences_finished",
            "Sequences by finish reason; error and disconnect included.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._refusals = Counter(
            "remora_refusals",
            "Requests refused, and streams closed, by the limit that they were over.",
            ("model_name", "limit"),
            registry=self.registry,
        )
        self._call_faults = Counter(
            "remora_tool_call_faults",
            "Tool calls that models wrote badly, by format and kind of fault.",
            ("model_name", "format", "kind"),
            registry=self.registry,
        )
        self.first_token = self._latencies(
            "time_to_first_token", "Arrival to first token.", _LONG_S
        )
        self.inter_token = self._latencies("inter_token_latency", "Between tokens.", _SHORT_S)
        self._whole = self._latencies("e2e_request_latency", "Arrival to last token.", _LONG_S)

    def _latencies(self, name: str, text: str, bounds_s: tuple[float, ...]) -> Latencies:
        latencies = Latencies(f"remora_{name}_seconds", text, self._model, bounds_s)
        self.registry.register(latencies)
        return latencies

    def count_response(self, route: str, status: int) -> None:
        """Count one HTTP response."""
        self._responses.labels(self._model, route, str(status)).inc()

    def count_refusal(self, limit: str) -> None:
        """Count a request refused by a limit, or a stream closed by one."""
        self._refusals.labels(self._model, limit).inc()

    def count_call_fault(self, format_name: str, fault: CallFault) -> None:
        """Count a tool call that a model wrote badly."""
        self._call_faults.labels(self._model, format_name, fault.value).inc()

    def count_finish(self, reason: str, num_sequences: int = 1) -> None:
        """Count sequences that ended."""
        self._finished.labels(self._model, reason).inc(num_sequences)

    def observe_first_token(self, seconds: float) -> None:
        """Note how long a call waited for its first token."""
        self.first_token.observe(seconds)

    def observe_tokens(self, seconds: float, num_tokens: int) -> None:
        """Note `num_tokens` tokens of one sequence that came `seconds` after the last one."""
        self.inter_token.observe(seconds / num_tokens, num_tokens)

    def observe_whole(self, seconds: float) -> None:
        """Note how long a whole call took."""
        self._whole.observe(seconds)

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)
