"""Our metrics under vLLM's names, for dashboards and scalers that were made for it.

A table and its application. Values, units and the label `model_name` are ours; a histogram has our
buckets. `engine` is always "0", because one replica has one engine. Metrics of vLLM without a
counterpart here are not exposed (docs/metrics.md lists them).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

# Ours without `remora_`, theirs without `vllm:`; counters without `_total`.
NAMES: Mapping[str, tuple[str, ...]] = {
    "num_running": ("num_requests_running",),
    "num_waiting": ("num_requests_waiting",),
    "kv_usage": ("kv_cache_usage_perc",),
    "preemptions": ("num_preemptions",),
    "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "cached_tokens": ("prompt_tokens_cached", "prefix_cache_hits"),
    "generated_tokens": ("generation_tokens",),
    "sequences_finished": ("request_success",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "queue_time_seconds": ("request_queue_time_seconds",),
    "prefill_time_seconds": ("request_prefill_time_seconds",),
    "decode_time_seconds": ("request_decode_time_seconds",),
    "prompt_length_tokens": ("request_prompt_tokens",),
    "output_length_tokens": ("request_generation_tokens",),
    "drafted_rows": ("spec_decode_num_drafts",),
    "draft_tokens": ("spec_decode_num_draft_tokens",),
    "accepted_drafts": ("spec_decode_num_accepted_tokens",),
    "right_drafts_by_position": ("spec_decode_num_accepted_tokens_per_pos",),
}
_SUMMED_LABELS = frozenset({"source"})
_FINISHED_REASONS = {"disconnect": "abort"}


class VllmMetrics(Collector):
    """Exports the metrics of `source` that have a name in vLLM, under that name."""

    def __init__(self, source: Collector) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """Yield the current values."""
        for metric in self._source.collect():
            for name in NAMES.get(metric.name.removeprefix("remora_"), ()):
                yield _renamed(metric, f"vllm:{name}")


def _renamed(metric: Metric, name: str) -> Metric:
    """Return a metric under another name; samples that differ in summed labels only are added."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in metric.samples:
        suffix = sample.name.removeprefix(metric.name)
        if suffix != "_created":
            key = (name + suffix, tuple(_labels(sample.labels)))
            sums[key] = sums.get(key, 0.0) + sample.value
    renamed = Metric(name, f"vLLM's name of {metric.name}: {metric.documentation}", metric.type)
    for (sample_name, labels), value in sums.items():
        renamed.add_sample(sample_name, dict(labels), value)
    return renamed


def _labels(labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "engine", "0"
    for name, value in labels.items():
        if name == "position":  # ours begin with 1
            yield name, str(int(value) - 1)
        elif name == "reason":
            yield "finished_reason", _FINISHED_REASONS.get(value, value)
        elif name not in _SUMMED_LABELS:
            yield name, value
