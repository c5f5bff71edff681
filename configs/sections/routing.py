"""Which replica answers a request: the section `routing` of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from remora.configs.fields import Name, Seconds, Section, conflict

Policy = Literal["power_of_two", "round_robin", "shortest_queue", "prefix", "session", "lora"]
# What these go by stands in a request's body, which Serve's proxies do not read.
READS_BODY: frozenset[Policy] = frozenset({"prefix", "session", "lora"})
# These have nothing else to go by; a session may also be named by a header.
NEEDS_BODY: frozenset[Policy] = frozenset({"prefix", "lora"})


class RoutingSection(Section):
    """Which replica answers a request, and what happens while none can."""

    policy: Policy = "power_of_two"
    """power_of_two = the less busy of two at random; round_robin; shortest_queue = fewest tokens
    to compute; prefix = who holds most of the prompt in cache, unless too busy; session = the same
    for the same session (header, prompt_cache_key or user; in Serve's own proxy header only); lora
    = who holds the adapter in memory, unless too busy."""

    session_header: Name = "x-session-id"
    """Header that names a session, for the policy session. In Serve's own proxy it is Serve's,
    x-session-id."""

    max_imbalance: Annotated[float, Field(ge=1, le=100)] = 1.5
    """Load beyond which prefix, session and lora leave the preferred replica, as a multiple of the
    least loaded replica's."""

    max_reported_pages: Annotated[int, Field(ge=64, le=2**20)] = 8192
    """Most cached pages that a replica reports, the latest used first; policy prefix."""

    stats_period_s: Annotated[float, Field(ge=0.1, le=60)] = 0.5
    """Seconds between two reports of a replica's load."""

    gateway: Literal["auto", "on", "off"] = "auto"
    """Whether a Gateway stands before the replicas. It reads bodies, holds requests while there is
    no replica and resumes streams; auto = where one of these is asked for, unless HAProxy can
    ask a RoutingService which replica is to answer."""

    num_gateways: Annotated[int, Field(ge=1, le=256)] = 1
    """Gateways, if there are any."""

    max_held_requests: Annotated[int, Field(ge=0, le=2**20)] = 256
    """Most requests that a gateway holds while no replica is ready; beyond it HTTP 503."""

    hold_timeout_s: Seconds = 600.0
    """Seconds that a request is held; beyond it HTTP 503."""

    resume_on_failure: bool = False
    """Whether the gateway continues a stream on another replica when its own has died, from the
    tokens already sent. Only for greedy or seeded requests; others end with an error event."""

    max_crashes: Annotated[int, Field(ge=1, le=100)] = 2
    """Replicas that may die over one request before it is refused for good (HTTP 500)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gateway == "off":
            if self.policy in NEEDS_BODY:
                raise conflict("gateway", f"policy {self.policy} needs it; set it to auto")
            if self.resume_on_failure:
                raise conflict("gateway", "resume_on_failure needs it; set it to auto")
        return self
