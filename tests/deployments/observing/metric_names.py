"""Every metric that a server can expose: what dashboards, alerts and documentation may name."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from remora.configs.sections.metrics import MetricsSection
from remora.deployments.gateway.metrics import GatewayMetrics
from remora.deployments.http.core.metrics import Metrics
from remora.deployments.parsers.tool_calls.faults import CallFault
from remora.deployments.ranks.stats import RankCollector, RankStats
from remora.engine.spec.counts import DraftCounts
from remora.engine.tenants import TenantStats
from remora.lora.adapter_cache import AdapterCache
from tests.deployments.fakes import FakeGrammars, make_stats
from tests.lora.fake_loader import FakeLoader


def full_metrics(**keys: object) -> Metrics:
    """Return the metrics of a replica with adapters, speculation, tenants and several ranks."""
    counts = DraftCounts(num_rows=3, num_drafts=10, num_accepted=6)
    stats = make_stats(
        num_running=2,
        prompt_tokens_total=100,
        cached_tokens_total=40,
        generated_tokens_total=30,
        preemptions_total=1,
        drafts_by_source=(("ngram", counts), ("prediction", counts)),
        tried_drafts=(6, 4),
        right_drafts=(5, 1),
        tenants=(
            TenantStats(
                name="search",
                num_running=1,
                num_waiting=0,
                num_held_pages=4,
                served_tokens_total=50,
            ),
        ),
    )
    metrics = Metrics(
        lambda: stats,
        "tiny",
        grammar_stats=FakeGrammars().stats,
        adapter_stats=lambda: AdapterCache(FakeLoader(), max_loaded=1).stats,
        keys=MetricsSection.model_validate(keys),
    )
    ranks = {0: RankStats.here(num_steps=1, step_time_s=0.5)}
    metrics.registry.register(RankCollector(lambda: ranks, "tiny"))
    metrics.count_response("/v1/chat/completions", 200)
    metrics.count_refusal("max_n")
    metrics.count_tenant_request("search", "started")
    metrics.count_call_fault("hermes", next(iter(CallFault)))
    request = metrics.of_request(())
    request.prompt(100)
    request.first_token(0.25, 0.05)
    request.tokens(0.1, 2)
    request.finished("stop", 30)
    request.count_finish("disconnect")
    request.whole(1.25)
    return metrics


def gateway_metrics() -> GatewayMetrics:
    """Return the metrics of a gateway of one model."""
    gateway = GatewayMetrics()
    gateway.watch_held({"tiny": lambda: 0})
    gateway.count_response("/", 200)
    gateway.count_refusal("max_n")
    gateway.failures("tiny").crashed()
    return gateway


def all_metrics() -> list[Metric]:
    """Return the metrics of both."""
    return [*full_metrics().collect(), *gateway_metrics().collect()]


def series_names(metrics: Iterable[Metric]) -> set[str]:
    """Return the names that a query may use: of samples, and of histograms their three."""
    names = {sample.name for metric in metrics for sample in metric.samples}
    return {name for name in names if not name.endswith("_created")}
