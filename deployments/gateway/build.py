"""Whether a gateway stands before the replicas, or HAProxy asks a chooser. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.configs.live_update import GATEWAY
from remora.configs.schema import ServeConfig
from remora.configs.sections.routing import READS_BODY

_LONGEST = ("graceful_shutdown_timeout_s", "graceful_shutdown_wait_loop_s")


def goes_direct(configs: Sequence[ServeConfig], *, is_asked: bool) -> bool:
    """Return whether HAProxy is to ask a chooser, and to go straight to the replica then.

    That is for where only a policy would need a gateway: nobody holds requests there, or gives them
    to another replica.

    is_asked:  whether HAProxy stands before the ingress and can ask
    """
    if not is_asked or len(configs) > 1:
        return False
    (config,) = configs
    routing = config.routing
    is_wanted = routing.gateway == "on" or routing.resume_on_failure or _may_be_none(config)
    return routing.policy != "power_of_two" and not is_wanted


def needs_gateway(
    configs: Sequence[ServeConfig], *, has_haproxy: bool, is_asked: bool = False
) -> bool:
    """Return whether these models, which are to answer at one address, need a gateway.

    has_haproxy:  whether HAProxy stands before the ingress: it balances by itself, so that a policy
                  of ours needs a place of its own
    is_asked:     see `goes_direct`
    """
    if goes_direct(configs, is_asked=is_asked):
        return False
    return len(configs) > 1 or any(_asks_for_one(config, has_haproxy) for config in configs)


def _asks_for_one(config: ServeConfig, has_haproxy: bool) -> bool:
    routing = config.routing
    if routing.gateway != "auto":
        return routing.gateway == "on"
    reads_body = routing.policy in READS_BODY
    is_ours = has_haproxy and routing.policy != "power_of_two"
    return reads_body or _may_be_none(config) or routing.resume_on_failure or is_ours


def _may_be_none(config: ServeConfig) -> bool:
    return config.autoscaling.is_on and config.autoscaling.min_replicas == 0


def gateway_options(
    models: Mapping[str, Mapping[str, Any]], configs: Mapping[str, ServeConfig]
) -> Mapping[str, Any]:
    """Return Serve's options of the gateway.

    models:  Serve's options of each model's deployment
    """
    max_requests = sum(
        models[name]["max_ongoing_requests"] * _max_replicas(config)
        + config.routing.max_held_requests
        for name, config in configs.items()
    )
    shared = next(iter(configs.values()))
    same = next(iter(models.values()))
    keys = (
        "backpressure_config",
        "health_check_period_s",
        "health_check_timeout_s",
    )
    return {
        "name": GATEWAY,
        "num_replicas": shared.routing.num_gateways,
        # It waits and copies; Ray's CPUs are for what computes.
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": max_requests,
        "max_queued_requests": max_requests,
        "max_constructor_retry_count": 2,
        **{key: same[key] for key in keys},
        # Its answers may come from any model, the slowest to end too.
        **{key: max(model[key] for model in models.values()) for key in _LONGEST},
    }


def _max_replicas(config: ServeConfig) -> int:
    return config.autoscaling.max_replicas or config.parallel.num_replicas
