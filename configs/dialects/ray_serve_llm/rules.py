"""Ray Serve LLM's configuration: entries of `llm_configs`, and the arguments of its builder.

Fields are named by their path (`lora_config.download_timeout_s`); `engine_kwargs` are vLLM's
arguments, with vLLM's rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.dialects.catalogue import ENGINE, Parameter, catalogue, engine_kwarg
from remora.configs.dialects.dialect import Dialect
from remora.configs.dialects.ray_serve_llm import values
from remora.configs.dialects.ray_serve_llm.files import flatten, models
from remora.configs.dialects.rules import (
    UNSAID,
    Effect,
    Harmless,
    Means,
    NoEffect,
    Refused,
    Rule,
    Sets,
    Settings,
)
from remora.configs.dialects.values import WrongValue, coerce
from remora.configs.dialects.vllm.rules import RULES as VLLM_RULES

_OWN_CODE = Refused("Python code from outside the package is not loaded into the server")
_FACTOR = Refused("the policy computes how many replicas are needed, without a factor", off=(1.0,))
_PROBES = NoEffect(
    "Serve probes replicas every second, and hung steps fail (engine.step_timeout_s)"
)
_SCALING, _DEPLOYMENT = "deployment_config.autoscaling_config.", "deployment_config."

OWN: Mapping[str, Rule] = {
    "model_loading_config.model_id": values.MODEL_ID,
    "model_loading_config.model_source": values.SOURCE,
    "model_loading_config.tokenizer_source": Sets(key="model.tokenizer_path"),
    "llm_engine": NoEffect(
        "the engine is remora's", only=("vLLM",), otherwise="supported: vLLM, or leave it out"
    ),
    "accelerator_type": values.ACCELERATOR,
    "accelerator_config.kind": Sets(
        key="engine.device",
        table={"gpu": "cuda", "cpu": "cpu"},
        strict=True,
        otherwise="TPUs are not supported",
    ),
    "accelerator_config.topology": Refused("TPUs are not supported"),
    "placement_group_config.bundle_per_worker": values.BUNDLE,
    "placement_group_config.bundles": values.BUNDLES,
    "placement_group_config.strategy": Sets(key="parallel.placement"),
    "lora_config.dynamic_lora_loading_path": values.LORA_PATH,
    "lora_config.max_num_adapters_per_replica": Sets(
        key="lora.max_loaded_loras", how="in host memory; lora.max_loras_per_batch are in one step"
    ),
    "lora_config.download_timeout_s": Sets(key="lora.load_timeout_s"),
    "lora_config.max_download_tries": NoEffect("a failed adapter is tried at the next scan"),
    "server_cls": _OWN_CODE,
    "runtime_env": values.ENVIRONMENT,
    "log_engine_metrics": Sets(key="metrics.enabled"),
    "callback_config.callback_class": _OWN_CODE,
    "callback_config.callback_kwargs": NoEffect("it has no effect without callback_class"),
    "callback_config.raise_error_on_callback": NoEffect("it has no effect without callback_class"),
    "experimental_configs.stream_batching_interval_ms": NoEffect(
        "tokens are sent when they come; engine_kwargs.stream_interval gathers them by number"
    ),
    "experimental_configs.num_ingress_replicas": Sets(
        key="routing.num_gateways", how="processes of the gateway, if the configuration needs one"
    ),
    "ingress_deployment_config": values.INGRESS,
    "ingress_cls_config.ingress_cls": _OWN_CODE,
    "ingress_cls_config.ingress_extra_kwargs": NoEffect("it has no effect without ingress_cls"),
}
DEPLOYMENT: Mapping[str, Rule] = {
    f"{_SCALING}min_replicas": Sets(key="autoscaling.min_replicas"),
    f"{_SCALING}initial_replicas": Sets(key="autoscaling.initial_replicas"),
    f"{_SCALING}max_replicas": Sets(key="autoscaling.max_replicas"),
    f"{_SCALING}target_ongoing_requests": Sets(
        key="autoscaling.target_requests", how="running requests; the queue and latencies count too"
    ),
    f"{_SCALING}look_back_period_s": Sets(key="autoscaling.look_back_s"),
    f"{_SCALING}upscale_delay_s": Sets(key="autoscaling.upscale_delay_s"),
    f"{_SCALING}downscale_delay_s": Sets(key="autoscaling.downscale_delay_s"),
    f"{_SCALING}downscale_to_zero_delay_s": Sets(key="autoscaling.to_zero_delay_s"),
    f"{_SCALING}metrics_interval_s": NoEffect("replicas report their load about once a second"),
    f"{_SCALING}smoothing_factor": _FACTOR,
    f"{_SCALING}upscale_smoothing_factor": _FACTOR,
    f"{_SCALING}downscale_smoothing_factor": _FACTOR,
    f"{_SCALING}upscaling_factor": _FACTOR,
    f"{_SCALING}downscaling_factor": _FACTOR,
    f"{_SCALING}aggregation_function": NoEffect(
        "loads are averaged",
        only=("mean", "MEAN"),
        otherwise="not offered: other aggregations; mean works",
    ),
    f"{_SCALING}policy": _OWN_CODE,
    f"{_DEPLOYMENT}name": NoEffect("deployments are named after the model"),
    f"{_DEPLOYMENT}num_replicas": values.REPLICAS,
    f"{_DEPLOYMENT}ray_actor_options": values.ACTOR,
    f"{_DEPLOYMENT}max_ongoing_requests": Sets(
        key="api.max_concurrent_requests", how="further requests get HTTP 429"
    ),
    f"{_DEPLOYMENT}max_queued_requests": Sets(
        key="engine.max_queued_requests",
        unset={-1: "engine.max_queued_requests keeps its default"},
        how="sequences that wait in a replica's engine; further requests get HTTP 429",
    ),
    f"{_DEPLOYMENT}user_config": Refused(
        "write what changes while replicas run under deployments, in remora's keys"
    ),
    f"{_DEPLOYMENT}health_check_period_s": _PROBES,
    f"{_DEPLOYMENT}health_check_timeout_s": _PROBES,
    f"{_DEPLOYMENT}graceful_shutdown_wait_loop_s": NoEffect(
        "a stopping replica ends with its last request"
    ),
    f"{_DEPLOYMENT}graceful_shutdown_timeout_s": Sets(key="api.drain_timeout_s"),
    f"{_DEPLOYMENT}logging_config": values.LOGGING,
    f"{_DEPLOYMENT}request_router_config": values.ROUTER,
}
# Arguments that Ray Serve LLM sets itself.
_NOT_HERE = Refused("use model_loading_config instead, as Ray Serve LLM requires")
_SERVES = Refused("Ray Serve listens: write http_options into the file")


def _engine_rule(parameter: Parameter, rule: Rule) -> Means:
    """Return a rule of vLLM's as the rule of a field of `engine_kwargs`."""

    def read(value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
        theirs = {
            f"--{name.removeprefix(ENGINE).replace('_', '-')}": each
            for name, each in given.items()
            if name.startswith(ENGINE)
        }
        return rule.read(value, theirs)

    def write(settings: Settings) -> Any:
        for value in rule.write(settings):
            try:
                if coerce(parameter, value) == value:
                    return value
            except WrongValue:
                continue
        return UNSAID

    return Means(keys=rule.keys, reads=read, writes=write, how=rule.how)


_ENGINE: Mapping[str, Rule] = {
    engine_kwarg(name): _engine_rule(parameter, VLLM_RULES[name])
    for name, parameter in catalogue("vllm").items()
    if name in VLLM_RULES
}
RULES: Mapping[str, Rule] = {
    **_ENGINE,
    f"{ENGINE}model": _NOT_HERE,
    f"{ENGINE}served_model_name": _NOT_HERE,
    f"{ENGINE}host": _SERVES,
    f"{ENGINE}port": _SERVES,
    **OWN,
    **DEPLOYMENT,
}

RAY_SERVE_LLM = Dialect(
    system="ray_serve_llm",
    title="Ray Serve LLM",
    rules=RULES,
    flatten=flatten,
    split=models,
)
