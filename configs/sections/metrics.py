"""Counters, traces, logs: the section `metrics` of a configuration.

Edges of histograms: `buckets.py`; what is logged: `logs.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from remora.configs.fields import Name, Seconds, Secret, conflict
from remora.configs.sections.metrics_buckets import BucketKeys
from remora.configs.sections.metrics_logs import LogKeys

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")
_TAKEN = frozenset({"model_name", "reason", "replica", "le", "job", "instance", "rank"})


def _check_label(name: str) -> str:
    if not _LABEL.fullmatch(name) or name.startswith("__"):
        raise PydanticCustomError(
            "label", "must be a Prometheus label: letters, digits and _, not beginning with __"
        )
    if name in _TAKEN:
        raise PydanticCustomError("label", "is a label of our own; choose another name")
    return name


Label = Annotated[str, AfterValidator(_check_label)]


class MetricsSection(LogKeys, BucketKeys):
    """Counters, traces, logs."""

    enabled: bool = True
    """Whether /metrics shows Prometheus counters and histograms."""

    per_rank: bool = False
    """Whether each rank of a replica shows steps, time and memory of its own, labelled `rank`."""

    request_labels: list[Label] = Field(default_factory=list, max_length=8)
    """Labels that requests may bring for their own metrics; none by default. Each set of values is
    a series of its own; beyond 1000 sets the values are `other`."""

    request_labels_header: Name = "x-custom-labels"
    """Header that holds them, as a JSON object of texts."""

    push_url: Name | None = None
    """Prometheus push gateway that each replica sends its metrics to. Default: none."""

    push_period_s: Annotated[float, Field(ge=0.1, le=86_400)] = 10.0
    """Seconds between two pushes."""

    push_job: Name = "remora"
    """Job under which they are pushed."""

    push_labels: dict[Label, Name] = Field(default_factory=dict, max_length=8)
    """Labels of the group that is pushed, beside job and `instance`, which names the replica."""

    push_auth: Secret | None = None
    """Credentials for it, USER:PASSWORD or a bearer token: env:NAME or file:/path."""

    trace_endpoint: Name | None = None
    """OpenTelemetry collector, host:port (gRPC; https://host:port by TLS), that gets spans of each
    request: queued, prefill, decode. A caller's traceparent is honoured. Needs remora[otel]."""

    max_step_records: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Latest steps of the engine that the administrative route /step_records shows. 0 = none."""

    step_records_s: Seconds = 60.0
    """Seconds after which a step is shown there no longer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        written = self.model_fields_set
        for key in ("push_period_s", "push_job", "push_labels", "push_auth"):
            if key in written and self.push_url is None:
                raise conflict(key, "has no effect without push_url; give both")
        for key in ("prompt_token_buckets", "output_token_buckets"):
            if getattr(self, key) is not None and not self.token_histograms:
                raise conflict(key, "has no effect while token_histograms is false")
        if "request_labels_header" in written and not self.request_labels:
            raise conflict("request_labels_header", "has no effect without request_labels")
        if len(set(self.request_labels)) < len(self.request_labels):
            raise conflict("request_labels", "a label stands there twice")
        return self
