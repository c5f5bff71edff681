"""The Serve options that make a deployment's requests go where the configuration says.

HAProxy sends requests to the ingress deployment's replicas by itself, to the one with the fewest
connections, and Serve refuses a router of one's own there; so under it every other policy needs
somebody with a handle in which the router runs: a chooser that HAProxy asks, or a gateway before
the replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve._private.constants import SERVE_SESSION_ID
from ray.serve.config import RequestRouterConfig

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig
from remora.configs.sections.routing import NEEDS_BODY
from remora.deployments.routing.router import RemoraRouter


def routing_options(
    config: ServeConfig, *, behind_gateway: bool = False, has_chooser: bool = False
) -> Mapping[str, Any]:
    """Return the Serve options of the policy, for the deployment of the replicas.

    behind_gateway:  whether requests come through a gateway's handle; if not, power_of_two is what
                     Serve does by itself
    has_chooser:     whether they are chosen for by a chooser's handle, and come by another way
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
                "hears_ends": not has_chooser,
            },
            request_routing_stats_period_s=routing.stats_period_s,
        )
    }


def check_alone(config: ServeConfig, *, has_haproxy: bool) -> None:
    """Raise ConfigError if the policy cannot be followed with neither gateway nor chooser."""
    routing = config.routing
    if routing.policy in NEEDS_BODY or (has_haproxy and routing.policy != "power_of_two"):
        why = "HAProxy chooses replicas itself" if has_haproxy else "Serve's proxy reads no bodies"
        raise ConfigError(
            f"routing.policy is {routing.policy}, which needs a gateway before the replicas: {why}."
            " Set routing.gateway to auto or on, or routing.policy to power_of_two."
        )
    if routing.policy == "session" and _plain(routing.session_header) != _plain(SERVE_SESSION_ID):
        raise ConfigError(
            f"routing.session_header is {routing.session_header}, but without a gateway a session"
            f" is named by Serve's own header, {SERVE_SESSION_ID}. Set it to that, set"
            " RAY_SERVE_SESSION_ID_HEADER_KEY where Ray is started, or routing.gateway to auto."
        )


def _plain(header: str) -> str:
    return header.lower().replace("_", "-")
