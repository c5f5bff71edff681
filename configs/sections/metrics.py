"""The section `metrics`: counters, histograms, pushes, traces and logs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from remora.configs.fields import Name, Seconds, Secret, Section

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")
_RESERVED_LABELS = frozenset(
    {"model_name", "reason", "replica", "le", "job", "instance", "rank"}
    | {"application", "deployment", "engine", "finished_reason"}
)


def _check_label(name: str) -> str:
    if not _LABEL.fullmatch(name) or name.startswith("__"):
        raise PydanticCustomError(
            "label", "must be a Prometheus label: letters, digits and _, not beginning with __"
        )
    if name in _RESERVED_LABELS:
        raise PydanticCustomError("label", "is a label that remora uses; choose another name")
    return name


def _check_ascending(edges: list[float]) -> list[float]:
    if any(right <= left for left, right in pairwise(edges)):
        raise PydanticCustomError("ascending", "must be strictly ascending")
    return edges


Label = Annotated[str, AfterValidator(_check_label)]
Edges = Annotated[
    list[Annotated[float, Field(ge=0, le=1e12)]],
    Field(min_length=1, max_length=256),
    AfterValidator(_check_ascending),
]
Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class MetricsSection(Section):
    """Metrics, traces, logs."""

    # Prometheus metrics

    enabled: bool = True
    """Whether /metrics serves Prometheus counters and histograms."""

    compat: Literal["vllm"] | None = None
    """Whose metric names are exposed in addition to remora's, with the same values: vllm. Default:
    none."""

    export_to_ray: bool = True
    """Whether the metrics also reach Ray's metrics agent of the node, which serves them to Ray's
    own Prometheus targets with the prefix ray_ and the labels deployment and replica."""

    per_rank: bool = False
    """Whether each rank of a replica reports its own steps, time and memory, labelled `rank`."""

    request_labels: list[Label] = Field(default_factory=list, max_length=8)
    """Labels that requests may set on their metrics. Each combination of values is a separate
    series; after 256 combinations, or 64 of one API key, values become `other`. Default: none."""

    request_labels_header: Name = "x-custom-labels"
    """Request header that carries the values of request_labels, as a JSON object of strings."""

    # Histograms: upper bucket edges, ascending; the last bucket is unbounded

    first_token_buckets_s: Edges | None = None
    """Bucket edges of the time to first token, in seconds. Default: 0.01 to 300."""

    inter_token_buckets_s: Edges | None = None
    """Bucket edges of the time between two tokens, in seconds. Default: 0.001 to 5."""

    request_buckets_s: Edges | None = None
    """Bucket edges of the time of whole requests, in seconds. Default: 0.01 to 300."""

    token_histograms: bool = True
    """Whether prompt and output lengths have histograms."""

    prompt_token_buckets: Edges | None = None
    """Bucket edges of prompt lengths, in tokens. Default: powers of 2 up to 131072."""

    output_token_buckets: Edges | None = None
    """Bucket edges of output lengths, in tokens. Default: powers of 2 up to 131072."""

    # Push gateway

    push_url: Name | None = None
    """Prometheus push gateway to which each replica sends its metrics. Default: none."""

    push_period_s: Annotated[float, Field(ge=0.1, le=86_400)] = 10.0
    """Seconds between two pushes."""

    push_job: Name = "remora"
    """Job name of pushed metrics."""

    push_labels: dict[Label, Name] = Field(default_factory=dict, max_length=8)
    """Grouping labels of pushed metrics, in addition to `job` and `instance` (the replica)."""

    push_auth: Secret | None = None
    """Credentials for the push gateway, USER:PASSWORD or a bearer token: env:NAME or
    file:/path."""

    # Traces and step records

    trace_endpoint: Name | None = None
    """OpenTelemetry collector, host:port (gRPC; https://host:port for TLS), for the spans of each
    request: queued, prefill, decode. The client's traceparent is honoured. Needs remora[otel].
    Default: no traces."""

    max_step_records: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Recent engine steps that the administrative route /step_records returns. 0 = none."""

    step_records_s: Seconds = 60.0
    """Seconds that a step remains in /step_records."""

    # Logs

    log_level: Level | None = None
    """Log level of remora's loggers in each replica. Default: the level of Serve's
    logging_config."""

    log_config: Name | None = None
    """File with a Python logging configuration that each replica loads at start: a dictConfig as
    JSON or YAML, or an .ini file. Loggers are named remora.*. Default: log to Serve's handlers."""

    access_log_level: Level | None = None
    """Level of the access log, independent of log_level. It writes one INFO line per HTTP request,
    so WARNING and ERROR turn it off. Default: the level of Serve's logging_config."""

    access_log_skip: Annotated[list[Name], Field(max_length=256)] = Field(default_factory=list)
    """Paths whose requests are not in the access log, such as /health."""

    log_requests: Literal["none", "metadata", "sampling", "clipped", "full"] = "none"
    """What is logged at the end of each request: metadata = names, token counts, seconds;
    sampling = also its parameters; clipped = also the first log_clip_chars characters of prompt and
    output;
    full = also all of both."""

    log_responses: Literal["none", "clipped", "full"] = "none"
    """How much of each output is logged, independent of log_requests."""

    log_clip_chars: Annotated[int, Field(ge=1, le=2**20)] = 256
    """Characters of each prompt and output that `clipped` logs."""

    log_request_times: bool = False
    """Whether each request's seconds in queue, prefill and decode are logged."""

    log_stats_period_s: Seconds | None = 10.0
    """Seconds between two throughput log lines; an idle engine logs none. null = never."""

    log_step_interval: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Decode steps between two log lines about the running batch. Default: never."""

    log_gc_s: Seconds | None = None
    """Seconds from which a Python garbage collection is logged as a warning. Default: never."""

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        written = self.model_fields_set
        for key in ("push_period_s", "push_job", "push_labels", "push_auth"):
            if key in written and self.push_url is None:
                yield key, "has no effect without push_url; set both"
        if "export_to_ray" in written and self.export_to_ray and not self.enabled:
            yield "export_to_ray", "has no effect while enabled is false"
        for key in ("prompt_token_buckets", "output_token_buckets"):
            if getattr(self, key) is not None and not self.token_histograms:
                yield key, "has no effect while token_histograms is false"
        if "request_labels_header" in written and not self.request_labels:
            yield "request_labels_header", "has no effect without request_labels"
        if len(set(self.request_labels)) < len(self.request_labels):
            yield "request_labels", "contains a label twice"
