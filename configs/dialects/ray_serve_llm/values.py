"""Rules for fields of Ray Serve LLM whose values are not simply the value of a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.configs.dialects.rules import (
    UNSAID,
    Effect,
    Harmless,
    Means,
    Refusal,
    Settings,
    never,
)

_SOURCE, _BUNDLE = "model_loading_config.model_source", "placement_group_config.bundle_per_worker"
_SCALING = "deployment_config.autoscaling_config."
_GPU_TYPE = "accelerator_type:"

# model


def _of_id(value: str, given: Mapping[str, Any]) -> Effect:
    if given.get(_SOURCE):
        return Effect({"model.served_name": value})
    return Effect({"model.served_name": value, "model.path": value})


MODEL_ID = Means(
    keys=("model.served_name", "model.path"),
    reads=_of_id,
    how="without model_source also the model's path",
)


def _of_source(value: Any, given: Mapping[str, Any]) -> Effect:
    if not isinstance(value, str):
        raise Refusal("give a directory, a name of the hub or a URL (s3://, gs://) as a text")
    return Effect({"model.path": value})


def _to_source(settings: Settings) -> Any:
    path = settings.get("model.path")
    return path if path and path != settings.get("model.served_name") else UNSAID


SOURCE = Means(keys=("model.path",), reads=_of_source, writes=_to_source)


def _of_lora_path(value: str, given: Mapping[str, Any]) -> Effect:
    return Effect({"lora.repo": value, "lora.dynamic": True}, _FOLDERS)


_FOLDERS = "an adapter is called by the name of its folder, not MODEL:FOLDER"
LORA_PATH = Means(keys=("lora.repo", "lora.dynamic"), reads=_of_lora_path, how=_FOLDERS)

# resources


def _of_accelerator(value: str, given: Mapping[str, Any]) -> Settings:
    if value.startswith("TPU"):
        raise Refusal("TPUs are not supported")
    return {"parallel.accelerator_type": "A10G" if value == "A10" else value}


ACCELERATOR = Means(keys=("parallel.accelerator_type",), reads=_of_accelerator)


def _of_bundle(value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
    """Read the resources of a rank."""
    if not isinstance(value, Mapping):
        raise Refusal("expected an object of resources, such as CPU and GPU")
    settings: dict[str, Any] = {}
    for name, amount in value.items():
        if name == "CPU":
            settings["parallel.cpus_per_rank"] = float(amount)
        elif name == "memory":
            settings["parallel.memory_per_rank"] = int(amount)
        elif name == "GPU":
            if amount not in (0, 1):
                raise Refusal(f"GPU: {amount}: a rank has one GPU, or none on a CPU")
            if not amount:
                settings["engine.device"] = "cpu"
        elif name.startswith(_GPU_TYPE):
            settings["parallel.accelerator_type"] = name.removeprefix(_GPU_TYPE)
        else:
            raise Refusal(f"{name}: supported: CPU, GPU, memory, {_GPU_TYPE}NAME")
    return Effect(settings) if settings else Harmless("each rank has one GPU")


def _to_bundle(settings: Settings) -> Any:
    found: dict[str, Any] = {}
    if settings.get("parallel.cpus_per_rank") is not None:
        found["CPU"] = settings["parallel.cpus_per_rank"]
    if settings.get("parallel.memory_per_rank") is not None:
        found["memory"] = settings["parallel.memory_per_rank"]
    return found or UNSAID


_RANK = (
    "parallel.cpus_per_rank",
    "parallel.memory_per_rank",
    "parallel.accelerator_type",
    "engine.device",
)
BUNDLE = Means(
    keys=_RANK,
    reads=_of_bundle,
    writes=_to_bundle,
    how="a rank has one GPU; without GPUs it runs on a CPU",
)


def _of_bundles(value: Sequence[Any], given: Mapping[str, Any]) -> Effect | Harmless:
    kinds = [bundle for index, bundle in enumerate(value) if bundle not in value[:index]]
    if len(kinds) != 1:
        raise Refusal("not offered: ranks with different resources; make all bundles equal")
    tp = given.get("engine_kwargs.tensor_parallel_size") or 1
    ranks = tp * (given.get("engine_kwargs.pipeline_parallel_size") or 1)
    if len(value) != ranks:
        raise Refusal(f"{len(value)} bundles for {ranks} ranks; make them agree")
    return _of_bundle(kinds[0], given)


BUNDLES = Means(
    keys=_RANK,
    reads=_of_bundles,
    writes=never,
    how="one for each rank, all alike; see bundle_per_worker",
)


def _of_actor(value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
    if not isinstance(value, Mapping):
        raise Refusal("expected an object of options, such as num_cpus")
    known = {"num_cpus", "num_gpus", "memory", "accelerator_type"}
    if unknown := value.keys() - known:
        raise Refusal(f"{sorted(unknown)[0]}: supported: {', '.join(sorted(known))}")
    names = {"num_cpus": "CPU", "memory": "memory"}
    bundle = {names[key]: each for key, each in value.items() if key in names}
    if kind := value.get("accelerator_type"):
        bundle[f"{_GPU_TYPE}{kind}"] = 1
    return _of_bundle(bundle, given)


ACTOR = Means(
    keys=_RANK[:3],
    reads=_of_actor,
    writes=never,
    how="of each rank: the replica is rank 0",
)

# deployment


def _of_replicas(value: str, given: Mapping[str, Any]) -> Effect | Harmless:
    scaled = any(name.startswith(_SCALING) for name in given)
    if value == "auto":
        if f"{_SCALING}max_replicas" in given:
            return Harmless("autoscaling_config decides")
        return Effect({"autoscaling.max_replicas": 100}, "1 to 100, by load and latency")
    if not value.isdecimal():
        raise Refusal("expected a whole number or auto")
    if scaled:
        raise Refusal("autoscaling_config decides the number; remove one of the two, or say auto")
    return Effect({"parallel.num_replicas": int(value)})


REPLICAS = Means(
    keys=("parallel.num_replicas", "autoscaling.max_replicas"),
    reads=_of_replicas,
    writes=lambda settings: (
        str(settings["parallel.num_replicas"]) if "parallel.num_replicas" in settings else UNSAID
    ),
    how="auto means 1 to 100, by load and latency",
)
_ROUTERS = {
    "PrefixCacheAffinityRouter": "prefix",
    "PrefixAffinityRouter": "prefix",
    "KVAwareRouter": "prefix",
    "PowerOfTwoChoicesRequestRouter": "power_of_two",
    "RoundRobinRouter": "round_robin",
}


def _of_router(value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
    if not isinstance(value, Mapping):
        raise Refusal("expected an object with request_router_class")
    name = str(value.get("request_router_class", "")).replace(":", ".").rpartition(".")[2]
    if not name:
        return Harmless("no router is named")
    if name not in _ROUTERS:
        raise Refusal(f"{name}: supported: {', '.join(_ROUTERS)}; or set routing.policy")
    return Effect({"routing.policy": _ROUTERS[name]}, _ROUTING)


_ROUTING = "the policy only: its limits are routing.max_imbalance and the like"
ROUTER = Means(
    keys=("routing.policy",),
    reads=_of_router,
    writes=lambda settings: (
        {"request_router_class": "ray.serve.llm.request_router.PrefixCacheAffinityRouter"}
        if settings.get("routing.policy") == "prefix"
        else UNSAID
    ),
    how=_ROUTING,
)


def _of_logging(value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
    if not isinstance(value, Mapping):
        raise Refusal("expected an object of log_level and enable_access_log")
    if unknown := value.keys() - {"log_level", "enable_access_log"}:
        raise Refusal(f"{sorted(unknown)[0]}: set it in the file's own logging_config")
    settings: dict[str, Any] = {}
    if value.get("log_level"):
        settings["metrics.log_level"] = str(value["log_level"]).upper()
    if value.get("enable_access_log") is False:
        settings["metrics.access_log_level"] = "WARNING"
    return Effect(settings) if settings else Harmless("the levels do not change")


LOGGING = Means(
    keys=("metrics.log_level", "metrics.access_log_level"),
    reads=_of_logging,
    writes=lambda settings: (
        {"log_level": settings["metrics.log_level"]}
        if settings.get("metrics.log_level")
        else UNSAID
    ),
    how="of remora's loggers; other options go to the file's own logging_config",
)
_VARIABLES = ("VLLM_", "HF_", "HUGGING_FACE_", "RAY_SERVE_LLM_", "RAYLLM_", "NCCL_DEBUG")


def _of_environment(value: Any, given: Mapping[str, Any]) -> Harmless:
    """Accept variables of vLLM and of downloads, which nothing reads here."""
    if not isinstance(value, Mapping):
        raise Refusal("expected an object with env_vars")
    others = [name for name in value if name != "env_vars" and value[name]]
    variables = value.get("env_vars") or {}
    others += [name for name in variables if not str(name).startswith(_VARIABLES)]
    if others:
        raise Refusal(f"{others[0]}: write it into the runtime_env of the application in the file")
    return Harmless("variables of vLLM and of downloads are not read")


ENVIRONMENT = Means(
    keys=(),
    reads=_of_environment,
    writes=never,
    why="variables of vLLM and of downloads are not read; others belong to the application's own "
    "runtime_env",
)


def _of_ingress(value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
    if not isinstance(value, Mapping):
        raise Refusal("expected an object of Serve's options")
    if unknown := value.keys() - {"num_replicas"}:
        raise Refusal(f"{sorted(unknown)[0]}: supported: num_replicas, the number of gateways")
    if not value:
        return Harmless("no option is given")
    return Effect({"routing.num_gateways": value["num_replicas"]}, _GATEWAYS)


_GATEWAYS = "processes of the gateway, if the configuration needs one"
INGRESS = Means(keys=("routing.num_gateways",), reads=_of_ingress, writes=never, how=_GATEWAYS)
