"""How many replicas, by which signal: the section `autoscaling` of a configuration."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from remora.configs.fields import Seconds, Section, conflict

Count = Annotated[int, Field(ge=0, le=4096)]


class AutoscalingSection(Section):
    """How many replicas, by which signal. Off unless max_replicas is given."""

    max_replicas: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most replicas. Default: no autoscaling; parallel.num_replicas it is."""

    min_replicas: Count = 1
    """Fewest replicas. 0 = none while nobody asks; requests are then held by a gateway."""

    initial_replicas: Count | None = None
    """Replicas to begin with, and after each deployment that changes the configuration. Default:
    min_replicas to begin with; as many as there are after a change."""

    target_ttft_s: Seconds | None = None
    """Seconds until the first token that 90 of 100 requests should not exceed. Without it, requests
    should wait no longer than look_back_s in a queue."""

    target_itl_s: Seconds | None = None
    """Seconds between two tokens that 90 of 100 should not exceed."""

    target_kv_usage: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the KV cache in use beyond which replicas are added."""

    target_requests: Annotated[float, Field(gt=0, le=65_536)] | None = None
    """Requests running at one replica that it is meant for. Those that wait there count as a
    backlog, by the time that it takes; where replicas report nothing, all open requests count here.
    Default: three quarters of engine.max_running_requests."""

    look_back_s: Seconds = 10.0
    """Seconds of the past that load and latencies are taken from."""

    upscale_delay_s: Annotated[float, Field(ge=0, le=86_400)] = 5.0
    """Seconds that more replicas must have been wanted before they are added."""

    downscale_delay_s: Annotated[float, Field(ge=0, le=86_400)] = 120.0
    """Seconds that fewer must have been enough before some, half at most, are taken away. Twice as
    long and more after replicas were missed soon."""

    to_zero_delay_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """Seconds without any request before the last replica is taken away."""

    @property
    def is_on(self) -> bool:
        """Whether the number of replicas changes by itself."""
        return self.max_replicas is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas is None:
            if self.model_fields_set:
                key = sorted(self.model_fields_set)[0]
                raise conflict(key, "has no effect without max_replicas; give both")
            return self
        if self.min_replicas > self.max_replicas:
            raise conflict("min_replicas", f"must not exceed max_replicas ({self.max_replicas})")
        first = self.initial_replicas
        if first is not None and not self.min_replicas <= first <= self.max_replicas:
            raise conflict("initial_replicas", "must lie between min_replicas and max_replicas")
        return self
