"""The Serve application that `serve run configs/x.yaml` and `remora serve` start.

A config file names `build` in its `import_path`; `args` hold one ServeConfig, or several under
`models`. A config file's `deployments:` may override the options of these deployments by name:

    LLMServer, or LLMServer-<name> for each of several models    the replicas of a model
    Gateway          routes requests to models and replicas, where HAProxy cannot
    RoutingService   selects a replica for each request of HAProxy
    LoRAManager, or LoRAManager-<name>    loads adapters dynamically

Serve's limits are derived from the engine's limits and exceed them, so that the engine refuses
requests, with OpenAI-style errors, before Serve does.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig

from remora.configs.dialects.resolve import resolve
from remora.configs.live_update import DEPLOYMENT, MANAGER
from remora.configs.load import parse_models
from remora.configs.multiple_models import deployment_names, split_models
from remora.configs.planning.scheduling_plan import running_requests
from remora.configs.schema import ServeConfig
from remora.configs.sections.limits import UNNAMED
from remora.deployments.adapters.manager import LoRAManager
from remora.deployments.autoscaling.options import scaling_options
from remora.deployments.cluster_token import check_token
from remora.deployments.gateway.build import gateway_options, needs_gateway, uses_routing_service
from remora.deployments.gateway.gateway import Gateway
from remora.deployments.llm_server import LLMServer
from remora.deployments.model_versions import pin_versions
from remora.deployments.ranks.placement import placement_options
from remora.deployments.ray_private import uses_haproxy, with_routing_service
from remora.deployments.routing.haproxy_hook import haproxy_asks
from remora.deployments.routing.options import check_alone, routing_options
from remora.deployments.routing.routing_service import RoutingService, routing_service_options

logger = logging.getLogger("remora.app")

# Requests above the engine's limits that Serve still passes on, so that the engine refuses them.
# The router retries a request that Serve holds back; at ten times the load, this made the last
# response four times as late.
SLACK_REQUESTS = 1024
# A dead replica is detected after at most three failed checks.
HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S = 1.0, 10.0
RETRY_AFTER_S = 1.0
# Each replica has one open call to its adapter manager.
MANAGER_REQUESTS = 4096
# Time after the drain timeout to send error events and to stop the engine.
SHUTDOWN_S = 5.0


# No postponed annotations in this module: Serve reads the parameter's annotation to decide whether
# to validate the args. `parse_models` validates them instead, with better messages.
def build(args: dict[str, Any]) -> Application:
    """Return the application for the `args` of a config file. Raises ConfigError."""
    check_token(os.environ)
    resolved = resolve(args)
    for line in resolved.lines:
        logger.info("%s", line)
    args = pin_versions(resolved.args)
    configs = parse_models(args)
    names = deployment_names(tuple(configs))
    all_configs = tuple(configs.values())
    has_haproxy = uses_haproxy()
    can_ask = has_haproxy and haproxy_asks()
    has_routing_service = uses_routing_service(all_configs, haproxy_asks=can_ask)
    is_behind = needs_gateway(all_configs, has_haproxy=has_haproxy, haproxy_asks=can_ask)
    options = {
        name: {
            **deployment_options(
                config, behind_gateway=is_behind, has_routing_service=has_routing_service
            ),
            "name": names[name],
        }
        for name, config in configs.items()
    }
    if not is_behind:
        (config,), (only,) = all_configs, options.values()
        (model_args,) = split_models(args)
        replicas = (
            serve.deployment(serve.ingress()(LLMServer))
            .options(**only)
            .bind(model_args, *manager_of(config, only["name"], model_args))
        )
        if not has_routing_service:
            check_alone(config, has_haproxy=has_haproxy)
            return replicas
        routing_service = serve.deployment(serve.ingress()(RoutingService)).options(
            **routing_service_options(only)
        )
        return with_routing_service(replicas, routing_service.bind(model_args, replicas))
    # Serve supports one HTTP application; behind a gateway, `LLMServer.relay` runs the others.
    models = {
        name: serve.deployment(LLMServer)
        .options(**options[name])
        .bind(model_args, *manager_of(configs[name], names[name], model_args))
        for name, model_args in zip(configs, split_models(args), strict=True)
    }
    gateway = serve.deployment(serve.ingress()(Gateway))
    return gateway.options(**gateway_options(options, configs)).bind(args, models)


def manager_of(
    config: ServeConfig, deployment: str, model_args: Mapping[str, Any]
) -> list[Application]:
    """Return the adapter manager of a model with dynamic adapters, as a list of at most one.

    deployment:  name of the model's deployment
    """
    if not config.lora.dynamic:
        return []
    options = {
        "name": MANAGER + deployment.removeprefix(DEPLOYMENT),
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": 0},  # mostly idle
        "max_ongoing_requests": MANAGER_REQUESTS,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 1.0,
        "graceful_shutdown_timeout_s": SHUTDOWN_S,
        "max_constructor_retry_count": 2,
    }
    return [serve.deployment(LoRAManager).options(**options).bind(model_args)]


def deployment_options(
    config: ServeConfig, *, behind_gateway: bool = False, has_routing_service: bool = False
) -> Mapping[str, Any]:
    """Return Serve's options for a model's deployment. Does not open the model."""
    engine, drain_s = config.engine, config.api.drain_s
    # Each tenant has a queue of its own, and another one may be full.
    num_queues = max(1, len({*(t.name for t in config.limits.tenants), UNNAMED}))
    max_open = running_requests(engine)[1] + engine.max_queued_requests
    max_requests = num_queues * max_open + SLACK_REQUESTS
    return {
        "name": DEPLOYMENT,
        **scaling_options(config),
        **placement_options(config),
        **routing_options(
            config, behind_gateway=behind_gateway, has_routing_service=has_routing_service
        ),
        "max_ongoing_requests": max_requests,
        # Requests wait here while a replica is being replaced.
        "max_queued_requests": max_requests,
        "backpressure_config": BackpressureConfig(status_code=503, retry_after_s=RETRY_AFTER_S),
        "graceful_shutdown_wait_loop_s": min(1.0, drain_s),
        "graceful_shutdown_timeout_s": drain_s + SHUTDOWN_S,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        # Retrying a model that failed to load rarely helps.
        "max_constructor_retry_count": 2,
    }
