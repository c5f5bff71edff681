"""Whether requests pass through a gateway, or HAProxy asks a routing service. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.configs.live_update import GATEWAY
from remora.configs.schema import ServeConfig
from remora.configs.sections.routing import READS_BODY

# A gateway waits as long as its slowest model.
_LONGEST = ("graceful_shutdown_timeout_s", "graceful_shutdown_wait_loop_s")
_SHARED = ("backpressure_config", "health_check_timeout_s")
# All requests wait for a single gateway that has died, and a check costs it nothing.
HEALTH_CHECK_PERIOD_S = 0.5


def uses_routing_service(configs: Sequence[ServeConfig], *, haproxy_asks: bool) -> bool:
    """Return whether HAProxy asks a routing service and connects to the replica directly.

    True where a gateway would only apply the policy: nothing holds requests or retries them on
    another replica then.

    haproxy_asks:  whether HAProxy is the proxy and has the routing hook
    """
    if not haproxy_asks or len(configs) > 1:
        return False
    (config,) = configs
    routing = config.routing
    needs_more = routing.gateway == "on" or routing.resume_on_failure or _scales_to_zero(config)
    return routing.policy != "power_of_two" and not needs_more


def needs_gateway(
    configs: Sequence[ServeConfig], *, has_haproxy: bool, haproxy_asks: bool = False
) -> bool:
    """Return whether these models, served at one address, need a gateway.

    has_haproxy:   whether HAProxy is the proxy: it balances by itself, so every other policy runs
                   elsewhere
    haproxy_asks:  see `uses_routing_service`
    """
    if uses_routing_service(configs, haproxy_asks=haproxy_asks):
        return False
    return len(configs) > 1 or any(_needs_one(config, has_haproxy) for config in configs)


def _needs_one(config: ServeConfig, has_haproxy: bool) -> bool:
    routing = config.routing
    if routing.gateway != "auto":
        return routing.gateway == "on"
    reads_body = routing.policy in READS_BODY
    has_own_policy = has_haproxy and routing.policy != "power_of_two"
    return reads_body or _scales_to_zero(config) or routing.resume_on_failure or has_own_policy


def _scales_to_zero(config: ServeConfig) -> bool:
    return config.autoscaling.is_on and config.autoscaling.min_replicas == 0


def gateway_options(
    models: Mapping[str, Mapping[str, Any]], configs: Mapping[str, ServeConfig]
) -> Mapping[str, Any]:
    """Return Serve's options of the gateway.

    models:  Serve's options of each model's deployment, by model name
    """
    max_requests = sum(
        models[name]["max_ongoing_requests"]
        * (config.autoscaling.max_replicas or config.parallel.num_replicas)
        + config.routing.max_held_requests
        for name, config in configs.items()
    )
    any_model = next(iter(models.values()))
    return {
        "name": GATEWAY,
        "num_replicas": next(iter(configs.values())).routing.num_gateways,
        # It waits and copies; Ray's CPUs are for computation.
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": max_requests,
        "max_queued_requests": max_requests,
        "max_constructor_retry_count": 2,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        **{key: any_model[key] for key in _SHARED},
        **{key: max(model[key] for model in models.values()) for key in _LONGEST},
    }
