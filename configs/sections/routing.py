"""The section `routing`: which replica answers a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from remora.configs.fields import Name, Seconds, Section

Policy = Literal["power_of_two", "round_robin", "shortest_queue", "prefix", "session", "lora"]
# These policies depend on the request body, which Serve's proxies do not read.
READS_BODY: frozenset[Policy] = frozenset({"prefix", "session", "lora"})
# These depend on nothing else; a header can also name a session.
NEEDS_BODY: frozenset[Policy] = frozenset({"prefix", "lora"})


class RoutingSection(Section):
    """Choice of the replica for a request, and what happens while none is ready."""

    policy: Policy = "power_of_two"
    """How the replica for a request is chosen: power_of_two = the less busy of two random ones;
    round_robin; shortest_queue = fewest tokens to compute; prefix = longest cached prefix of the
    prompt, unless too busy; session = the same replica for the same session (header,
    prompt_cache_key or user; with Serve's own proxy the header only); lora = one with the adapter
    in memory, unless too busy."""

    session_header: Name = "x-session-id"
    """Header that names a session, for policy session. Serve's own proxy supports x-session-id
    only."""

    max_imbalance: Annotated[float, Field(ge=1, le=100)] = 1.5
    """Load, as a multiple of the least loaded replica's, above which policies prefix, session and
    lora leave the preferred replica."""

    max_reported_pages: Annotated[int, Field(ge=64, le=2**20)] = 8192
    """Most cached pages that a replica reports, most recently used first; for policy prefix."""

    stats_period_s: Annotated[float, Field(ge=0.1, le=60)] = 0.5
    """Seconds between two load reports of a replica."""

    gateway: Literal["auto", "on", "off"] = "auto"
    """Whether a gateway runs in front of the replicas. It reads request bodies, holds requests
    while no replica is ready, and resumes streams. auto = if the configuration needs one of these,
    unless HAProxy can ask a routing service for the replica."""

    num_gateways: Annotated[int, Field(ge=1, le=256)] = 1
    """Gateway replicas, if there is a gateway."""

    max_held_requests: Annotated[int, Field(ge=0, le=2**20)] = 256
    """Most requests that a gateway holds while no replica is ready; further ones get HTTP 503."""

    hold_timeout_s: Seconds = 600.0
    """Seconds that a request is held; then HTTP 503."""

    resume_on_failure: bool = False
    """Whether the gateway continues a stream on another replica if its replica fails, from the
    tokens already sent. Only for greedy or seeded requests; others end with an error event."""

    max_crashes: Annotated[int, Field(ge=1, le=100)] = 2
    """Replicas that may fail while they process a request before it is refused (HTTP 500)."""

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        if self.gateway == "off":
            if self.policy in NEEDS_BODY:
                yield "gateway", f"policy {self.policy} needs a gateway; set it to auto"
            if self.resume_on_failure:
                yield "gateway", "resume_on_failure needs a gateway; set it to auto"
