"""The section `autoscaling`: how many replicas run, by which signals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from remora.configs.fields import Seconds, Section

Count = Annotated[int, Field(ge=0, le=4096)]


class AutoscalingSection(Section):
    """Number of replicas, by load and latency. Off unless max_replicas is set."""

    max_replicas: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most replicas. Default: no autoscaling; parallel.num_replicas applies."""

    min_replicas: Count = 1
    """Fewest replicas. 0 = scale to zero when idle; a gateway then holds requests until a replica
    is ready."""

    initial_replicas: Count | None = None
    """Replicas after a deployment. Default: min_replicas for a new one; the current number after a
    change of the configuration."""

    target_ttft_s: Seconds | None = None
    """Target for the 90th percentile of the time to first token, in seconds. Without it, requests
    should wait at most look_back_s in the queue."""

    target_itl_s: Seconds | None = None
    """Target for the 90th percentile of the time between two tokens, in seconds. Default: none."""

    target_kv_usage: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Fraction of the KV cache in use above which replicas are added."""

    target_requests: Annotated[float, Field(gt=0, le=65_536)] | None = None
    """Running requests per replica to aim for. Waiting requests count as a backlog, by the time
    that it takes; if replicas report nothing, all open requests count. Default: three quarters of
    engine.max_running_requests, or of its smallest default for the kind of device."""

    look_back_s: Seconds = 10.0
    """Seconds over which load and latencies are measured."""

    upscale_delay_s: Annotated[float, Field(ge=0, le=86_400)] = 5.0
    """Seconds that more replicas must be needed before they are added."""

    downscale_delay_s: Annotated[float, Field(ge=0, le=86_400)] = 120.0
    """Seconds that fewer replicas must suffice before some, at most half, are removed. Doubles and
    more if removed replicas were soon needed again."""

    to_zero_delay_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """Seconds without any request before the last replica is removed."""

    @property
    def is_on(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas is not None

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        if self.max_replicas is None:
            if self.model_fields_set:
                key = sorted(self.model_fields_set)[0]
                yield key, "has no effect without max_replicas; set both"
            return
        if self.min_replicas > self.max_replicas:
            yield "min_replicas", f"must not exceed max_replicas ({self.max_replicas})"
        first = self.initial_replicas
        if first is not None and not self.min_replicas <= first <= self.max_replicas:
            yield "initial_replicas", "must be between min_replicas and max_replicas"
