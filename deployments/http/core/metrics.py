"""Prometheus metrics of one replica.

Engine counters are read from the engine's statistics at scrape time; values known only to the HTTP
layer (statuses, finish reasons, latencies as the client sees them) are observed here. Each
application has its own registry, so several can live in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from remora.configs.sections.metrics import MetricsSection
from remora.deployments.http.core.histograms import Histogram, Latencies
from remora.deployments.http.core.request_labels import RequestLabels
from remora.deployments.observing.metric_help import HELP
from remora.deployments.observing.vllm_metrics import VllmMetrics
from remora.deployments.parsers.tool_calls.faults import CallFault
from remora.engine.types import EngineStats

if TYPE_CHECKING:
    from remora.engine.grammar.service import GrammarStats

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = tuple(float(2**power) for power in range(18))
_DEFAULTS = MetricsSection()


class StatsCollector(Collector):
    """Exports statistics under their names: `*_total` as counters, the others as gauges.

    source:  origin of the statistics; part of the metric names, except for the engine
    """

    def __init__(
        self, stats: Callable[[], Mapping[str, float]], model: str, *, source: str = "engine"
    ) -> None:
        self._stats = stats
        self._model = model
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """Yield the current values."""
        prefix = "remora_" if self._source == "engine" else f"remora_{self._source}_"
        for name, value in self._stats().items():
            is_total = name.endswith(("_total", "_total_s"))
            family = CounterMetricFamily if is_total else GaugeMetricFamily
            # Prometheus names write out seconds, and those of counters end in _total.
            shown = name.replace("_total_s", "_seconds_total").replace("step_s", "step_seconds")
            full_name = prefix + shown
            text = HELP.get(full_name.removeprefix("remora_"), "")
            metric = family(full_name, text, labels=["model_name"])
            metric.add_metric([self._model], value)
            yield metric


class DraftsCollector(Collector):
    """Exports speculative decoding: drafts by source and by position in a row, and times.

    The first position is 1. Drafts of requests' predictions have a source of their own.
    """

    def __init__(self, stats: Callable[[], EngineStats], model: str) -> None:
        self._stats = stats
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """Yield the current values; nothing without speculation."""
        stats = self._stats()
        if not stats.drafts_by_source:
            return
        sources = dict(stats.drafts_by_source)
        for name, text, values in (
            (
                "draft_tokens",
                "Drafted tokens that the model verified, by source of the drafts.",
                [c.num_drafts for c in sources.values()],
            ),
            (
                "accepted_drafts",
                "Drafted tokens that the model confirmed, by source of the drafts.",
                [c.num_accepted for c in sources.values()],
            ),
            (
                "drafted_rows",
                "Rows of steps that had drafts; each yields one token more than confirmed drafts.",
                [c.num_rows for c in sources.values()],
            ),
        ):
            yield self._labelled(name, text, "source", zip(sources, values, strict=True))
        for name, text, counts in (
            ("verified", "Drafts whose predecessors in the row were right.", stats.tried_drafts),
            ("right", "Drafts that were right, as all before in the row.", stats.right_drafts),
        ):
            by_position = ((str(place), count) for place, count in enumerate(counts, start=1))
            yield self._labelled(f"{name}_drafts_by_position", text, "position", by_position)
        for name, text, value in (
            (
                "draft_time_seconds",
                "Time of draft models and heads, before the forward passes of their steps. "
                "Looking tokens up is not counted.",
                stats.draft_time_total_s,
            ),
            ("verify_steps", "Steps in which a row had drafts.", stats.verify_steps_total),
            (
                "verify_time_seconds",
                "Forward passes and sampling of the steps in which a row had drafts, with all "
                "their tokens: those of other rows and of prompts too. Drafting is not counted.",
                stats.verify_time_total_s,
            ),
        ):
            metric = CounterMetricFamily(f"remora_{name}", text, labels=["model_name"])
            metric.add_metric([self._model], value)
            yield metric

    def _labelled(
        self, name: str, text: str, label: str, values: Iterable[tuple[str, float]]
    ) -> Metric:
        metric = CounterMetricFamily(f"remora_{name}", text, labels=["model_name", label])
        for key, value in values:
            metric.add_metric([self._model, key], value)
        return metric


class TenantsCollector(Collector):
    """Exports the work of each tenant, by the names in the configuration."""

    def __init__(self, stats: Callable[[], EngineStats], model: str) -> None:
        self._stats = stats
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """Yield the current values; nothing without tenants."""
        named = [tenant for tenant in self._stats().tenants if tenant.name]
        for name, text, family, values in (
            (
                "running",
                "Running sequences of a tenant.",
                GaugeMetricFamily,
                [t.num_running for t in named],
            ),
            (
                "waiting",
                "Waiting sequences of a tenant.",
                GaugeMetricFamily,
                [t.num_waiting for t in named],
            ),
            (
                "held_pages",
                "KV pages of a tenant's running sequences; shared pages count for each sequence.",
                GaugeMetricFamily,
                [t.num_held_pages for t in named],
            ),
            (
                "tokens",
                "Tokens computed for a tenant, of prompts and outputs.",
                CounterMetricFamily,
                [t.served_tokens_total for t in named],
            ),
        ):
            labels = ["model_name", "tenant"]
            metric = family(f"remora_tenant_{name}", text, labels=labels)
            for tenant, value in zip(named, values, strict=True):
                metric.add_metric([self._model, tenant.name], value)
            if named:
                yield metric


_DRAFT_VALUES = (
    "draft_tokens_total",
    "accepted_drafts_total",
    "drafted_rows_total",
    "drafts_by_source",
    "tried_drafts",
    "right_drafts",
    "draft_time_total_s",
    "verify_steps_total",
    "verify_time_total_s",
)
_NOT_NUMBERS = (*_DRAFT_VALUES, "tenants")


def _values_of(stats: EngineStats) -> Mapping[str, float]:
    """Return the values that are numbers and that `DraftsCollector` does not export."""
    values = asdict(stats)
    for name in _NOT_NUMBERS:
        del values[name]
    return {**values, "kv_usage": stats.kv_usage}


class Metrics:
    """The counters and histograms of one application."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        model: str,
        *,
        grammar_stats: Callable[[], GrammarStats],
        adapter_stats: Callable[[], Mapping[str, float]] = dict,
        keys: MetricsSection = _DEFAULTS,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(StatsCollector(lambda: _values_of(stats()), model))
        self.registry.register(DraftsCollector(stats, model))
        self.registry.register(TenantsCollector(stats, model))
        self.registry.register(
            StatsCollector(lambda: asdict(grammar_stats()), model, source="grammar")
        )
        self.registry.register(StatsCollector(adapter_stats, model, source="lora"))
        self._compat = VllmMetrics(self.registry) if keys.compat == "vllm" else None
        self._model = model
        self._labels = tuple(keys.request_labels)
        self.labels = RequestLabels(keys.request_labels_header, keys.request_labels)
        self._responses = Counter(
            "remora_http_responses",
            "HTTP responses by route and status; 499 = the client had disconnected.",
            ("model_name", "route", "status"),
            registry=self.registry,
        )
        self._finished = Counter(
            "remora_sequences_finished",
            "Sequences by the reason of their end: stop, length, abort, error or disconnect.",
            ("model_name", "reason", *self._labels),
            registry=self.registry,
        )
        self._refusals = Counter(
            "remora_refusals",
            "Requests refused and streams closed, by the limit that they exceeded.",
            ("model_name", "limit"),
            registry=self.registry,
        )
        self._tenant_requests = Counter(
            "remora_tenant_requests",
            "Calls by tenant and outcome: started, or the limit that refused them.",
            ("model_name", "tenant", "outcome"),
            registry=self.registry,
        )
        self._call_faults = Counter(
            "remora_tool_call_faults",
            "Malformed tool calls in answers, by format and kind of fault.",
            ("model_name", "format", "kind"),
            registry=self.registry,
        )
        self._make_histograms(keys)

    def _make_histograms(self, keys: MetricsSection) -> None:
        self.first_token = self._latencies(
            "time_to_first_token",
            "Time from the arrival of a request to its first token.",
            keys.first_token_buckets_s or _LONG_S,
        )
        self.tenant_first_token = Latencies(
            "remora_tenant_time_to_first_token_seconds",
            "Time from the arrival of a request to its first token, by tenant.",
            self._model,
            keys.first_token_buckets_s or _LONG_S,
            labels=("tenant",),
        )
        self.registry.register(self.tenant_first_token)
        self.inter_token = self._latencies(
            "inter_token_latency",
            "Time between two tokens of a sequence.",
            keys.inter_token_buckets_s or _SHORT_S,
        )
        whole_s = keys.request_buckets_s or _LONG_S
        self.whole = self._latencies(
            "e2e_request_latency", "Time from the arrival of a request to its last token.", whole_s
        )
        self.queue = self._latencies(
            "queue_time", "Time from the arrival of a request to its first engine step.", _LONG_S
        )
        self.prefill = self._latencies(
            "prefill_time", "Time from a request's first engine step to its first token.", whole_s
        )
        self.decode = self._latencies(
            "decode_time", "Time from a request's first token to its last token.", whole_s
        )
        self.prompt_tokens = self._tokens(
            "prompt_length_tokens",
            "Tokens of each prompt.",
            keys.prompt_token_buckets or _TOKENS,
            is_shown=keys.token_histograms,
        )
        self.output_tokens = self._tokens(
            "output_length_tokens",
            "Tokens of the output of each finished sequence.",
            keys.output_token_buckets or _TOKENS,
            is_shown=keys.token_histograms,
        )

    def _latencies(self, name: str, text: str, shown_s: Sequence[float]) -> Latencies:
        name = f"remora_{name}_seconds"
        latencies = Latencies(name, text, self._model, shown_s, labels=self._labels)
        self.registry.register(latencies)
        return latencies

    def _tokens(self, name: str, text: str, shown: Sequence[float], *, is_shown: bool) -> Histogram:
        tokens = Histogram(f"remora_{name}", text, self._model, shown, labels=self._labels)
        if is_shown:
            self.registry.register(tokens)
        return tokens

    def count_response(self, route: str, status: int) -> None:
        """Count one HTTP response."""
        self._responses.labels(self._model, route, str(status)).inc()

    def count_refusal(self, limit: str) -> None:
        """Count a request refused by a limit, or a stream closed by one."""
        self._refusals.labels(self._model, limit).inc()

    def count_tenant_request(self, tenant: str, outcome: str) -> None:
        """Count a call of a tenant; "" = it has none, and is not counted."""
        if tenant:
            self._tenant_requests.labels(self._model, tenant, outcome).inc()

    def count_call_fault(self, format_name: str, fault: CallFault) -> None:
        """Count a malformed tool call of a model."""
        self._call_faults.labels(self._model, format_name, fault.value).inc()

    def count_finish(self, reason: str, num_sequences: int, labels: tuple[str, ...]) -> None:
        """Count finished sequences."""
        self._finished.labels(self._model, reason, *labels).inc(num_sequences)

    def of_request(self, labels: tuple[str, ...], tenant: str = "") -> RequestMetrics:
        """Return the metrics of a request with these label values; none given = all empty."""
        return RequestMetrics(self, labels or ("",) * len(self._labels), tenant)

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics, those under names of another server last."""
        yield from self.registry.collect()
        if self._compat is not None:
            yield from self._compat.collect()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        compat = b"" if self._compat is None else generate_latest(self._compat)
        return generate_latest(self.registry) + compat


class RequestMetrics:
    """The histogram series of one request.

    labels:  the request's label values
    tenant:  "" = it has none
    """

    def __init__(self, metrics: Metrics, labels: tuple[str, ...], tenant: str = "") -> None:
        self._metrics = metrics
        self._labels = labels
        self._tenant = tenant
        self._observe_inter_token: Callable[[float, int], None] | None = None
        self._first_token_s: float | None = None

    def prompt(self, num_tokens: int) -> None:
        """Record the length of a prompt."""
        self._metrics.prompt_tokens.observe(num_tokens, labels=self._labels)

    def first_token(self, seconds: float, queue_s: float) -> None:
        """Record the time to the first token, and the time in the queue."""
        self._metrics.first_token.observe(seconds, labels=self._labels)
        if self._tenant:
            self._metrics.tenant_first_token.observe(seconds, labels=(self._tenant,))
        self._metrics.queue.observe(queue_s, labels=self._labels)
        self._metrics.prefill.observe(max(0.0, seconds - queue_s), labels=self._labels)
        self._first_token_s = seconds

    def tokens(self, seconds: float, num_tokens: int) -> None:
        """Record `num_tokens` tokens of one sequence, `seconds` after the previous ones."""
        if self._observe_inter_token is None:  # looked up once: this runs for each token
            self._observe_inter_token = self._metrics.inter_token.series(self._labels).observe
        self._observe_inter_token(seconds / num_tokens, num_tokens)

    def finished(self, reason: str, num_tokens: int) -> None:
        """Record the end of a sequence and the length of its output."""
        self.count_finish(reason)
        self._metrics.output_tokens.observe(num_tokens, labels=self._labels)

    def count_finish(self, reason: str, num_sequences: int = 1) -> None:
        """Count finished sequences."""
        self._metrics.count_finish(reason, num_sequences, self._labels)

    def whole(self, seconds: float) -> None:
        """Record the duration of the whole request."""
        self._metrics.whole.observe(seconds, labels=self._labels)
        if self._first_token_s is not None:
            self._metrics.decode.observe(seconds - self._first_token_s, labels=self._labels)
