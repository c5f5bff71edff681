"""The Serve application: what `serve run configs/x.yaml` and `remora serve` start.

`build` is named in the config file's `import_path`; its `args` are the ServeConfig. The one
deployment is called `LLMServer`: a config file's `deployments:` may override its options by that
name. Serve's limits are derived here from the engine's, so that the engine's own refusals, which
speak OpenAI's language, come before Serve's.
"""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig

from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig
from remora.deployments.llm_server import LLMServer

DEPLOYMENT = "LLMServer"

# Room beside what the engine takes, so that the engine does the refusing: a request that Serve
# holds back costs its router one retry after another (measured at ten times the load: four times
# as long until everybody had an answer).
SLACK_REQUESTS = 1024
# A dead replica is found after three failed checks at most.
HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S = 2.0, 10.0
RETRY_AFTER_S = 1.0
# Given to the replica beyond `api.drain_timeout_s`, to stop its engine.
SHUTDOWN_S = 2.0


# No postponed annotations in this module: Serve looks at the parameter's annotation to decide
# whether to validate the args, and ours are validated by `parse_args`, with better messages.
def build(args: dict[str, Any]) -> Application:
    """Return the application for the `args` of a config file. Raises ConfigError."""
    config = parse_args(args)
    deployment = serve.deployment(serve.ingress()(LLMServer))
    return deployment.options(**deployment_options(config)).bind(args)


def deployment_options(config: ServeConfig) -> Mapping[str, Any]:
    """Return Serve's options of the deployment; pure, the model is not opened."""
    engine, drain_s = config.engine, config.api.drain_timeout_s
    max_requests = engine.max_running_requests + engine.max_queued_requests + SLACK_REQUESTS
    return {
        "name": DEPLOYMENT,
        "num_replicas": config.parallel.num_replicas,
        "ray_actor_options": _actor_options(config),
        "max_ongoing_requests": max_requests,
        # Requests wait here while a replica is being replaced.
        "max_queued_requests": max_requests,
        "backpressure_config": BackpressureConfig(status_code=503, retry_after_s=RETRY_AFTER_S),
        "graceful_shutdown_wait_loop_s": min(1.0, drain_s),
        "graceful_shutdown_timeout_s": drain_s + SHUTDOWN_S,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        # A model that cannot be loaded will not load the tenth time either.
        "max_constructor_retry_count": 2,
    }


def _actor_options(config: ServeConfig) -> dict[str, Any]:
    """Return what Ray reserves for a replica.

    CPU replicas take as many of Ray's CPUs as they were given threads, else one: Ray's CPUs are
    a book-keeping of its own, and asking for all of them would keep a small machine from starting.
    """
    if config.engine.device == "cuda":
        return {"num_cpus": 1, "num_gpus": 1}
    return {"num_cpus": 1}
