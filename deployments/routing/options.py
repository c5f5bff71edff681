"""The Serve options that route a deployment's requests by the configured policy.

HAProxy balances over the ingress deployment's replicas by itself, by fewest connections, and Serve
rejects a custom router there. Under HAProxy every other policy therefore runs in a process that
holds a handle to the replicas: a routing service or a gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.config import RequestRouterConfig

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig
from remora.configs.sections.routing import NEEDS_BODY
from remora.deployments.ray_private import session_header
from remora.deployments.routing.router import RemoraRouter


def routing_options(
    config: ServeConfig, *, behind_gateway: bool = False, has_routing_service: bool = False
) -> Mapping[str, Any]:
    """Return Serve's routing options of the replicas' deployment.

    behind_gateway:       whether requests arrive through a gateway's handle; if not, power_of_two
                          is Serve's own default
    has_routing_service:  whether a routing service picks replicas and requests arrive directly
    """
    routing = config.routing
    if routing.policy == "power_of_two" and not behind_gateway:
        return {}
    return {
        "request_router_config": RequestRouterConfig(
            request_router_class=RemoraRouter,
            request_router_kwargs={
                "policy": routing.policy,
                "max_imbalance": routing.max_imbalance,
                "page_size": config.engine.page_size,
                "max_pages": routing.max_reported_pages,
                "sees_completions": not has_routing_service,
            },
            request_routing_stats_period_s=routing.stats_period_s,
        )
    }


def check_alone(config: ServeConfig, *, has_haproxy: bool) -> None:
    """Raise ConfigError if the policy needs a gateway or a routing service and has neither."""
    routing = config.routing
    if routing.policy in NEEDS_BODY or (has_haproxy and routing.policy != "power_of_two"):
        why = "HAProxy picks replicas itself" if has_haproxy else "Serve's proxy reads no bodies"
        raise ConfigError(
            f"routing.policy is {routing.policy}, which needs a gateway before the replicas: {why}."
            " Set routing.gateway to auto or on, or routing.policy to power_of_two."
        )
    if routing.policy == "session" and _plain(routing.session_header) != _plain(session_header()):
        raise ConfigError(
            f"routing.session_header is {routing.session_header}, but without a gateway only"
            f" Serve's own header, {session_header()}, names a session. Set it to that, set"
            " RAY_SERVE_SESSION_ID_HEADER_KEY where Ray is started, or routing.gateway to auto."
        )


def _plain(header: str) -> str:
    return header.lower().replace("_", "-")
