"""Rules for SGLang's parameters whose values are not simply the value of a key.

`_of_x` reads a value, given all parameters; `_to_x` writes the value for settings.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from remora.configs.dialects.shared_rules import ROUNDED, WEIGHT_ONLY, only_with

ATTENTION = {
    "triton": "triton",
    "torch_native": "torch",
    "flashinfer": "flashinfer",
    "fa3": "fa3",
    "fa4": "fa4",
}
_LATENT = "not offered: latent attention of this library; set it to triton"
_AMD = "not offered: this library for AMD GPUs; set it to triton"
NO_ATTENTION = {
    "flex_attention": "not offered: FlexAttention; set it to triton",
    "nsa": "not offered: sparse attention; set it to triton for models without it",
    "cutlass_mla": _LATENT,
    "flashmla": _LATENT,
    "trtllm_mla": _LATENT,
    "trtllm_mha": "not offered: TensorRT-LLM's kernels; set it to flashinfer",
    "dual_chunk_flash_attn": "not offered: dual chunk attention; set it to fa3",
    "aiter": _AMD,
    "wave": _AMD,
    "intel_amx": "native CPU kernels use AMX without it; leave it out (engine.cpu_kernels)",
    "ascend": "this hardware is not supported; set it to triton on CUDA GPUs",
}
_THRESHOLD = 10  # SGLang's default
_PREFERRED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}
_REQUEST_LEVELS = ("metadata", "sampling", "clipped", "full")


def _of_kv_scales(value: str, given: Mapping[str, Any]) -> Harmless | Settings:
    if given.get("--kv-cache-dtype") != "fp8_e4m3":
        return Harmless("it has no effect without --kv-cache-dtype fp8_e4m3")
    return {"engine.kv_scales_file": value}


def _to_kv_scales(settings: Settings) -> Any:
    is_e4m3 = settings.get("engine.kv_dtype") == "fp8_e4m3"
    return settings.get("engine.kv_scales_file", UNSAID) if is_e4m3 else UNSAID


def _of_chunk(value: Any, given: Mapping[str, Any]) -> Effect | Harmless | Settings:
    if value == -1:
        return {"engine.chunked_prefill": False}
    return {"engine.prefill_chunk_tokens": value}


def _to_chunk(settings: Settings) -> Any:
    if settings.get("engine.chunked_prefill") is False:
        return -1
    return settings.get("engine.prefill_chunk_tokens", UNSAID)


CHUNK = Means(
    keys=("engine.prefill_chunk_tokens", "engine.chunked_prefill"),
    reads=_of_chunk,
    writes=_to_chunk,
)


def _of_lora(value: Any, given: Mapping[str, Any]) -> Effect | Harmless | Settings:
    if value:
        return {"lora.dynamic": True}
    if given.get("--lora-paths"):
        raise Refusal("--lora-paths lists adapters; remove one of the two")
    return {"lora.dynamic": False}


LORA = Means(keys=("lora.dynamic",), reads=_of_lora)


def _of_trace(value: bool, given: Mapping[str, Any]) -> Harmless | Settings:
    if not value:
        return Harmless("no spans are sent")
    return {"metrics.trace_endpoint": given.get("--otlp-traces-endpoint", "localhost:4317")}


def _to_trace(settings: Settings) -> Any:
    return "metrics.trace_endpoint" in settings or UNSAID


TRACE = Means(keys=("metrics.trace_endpoint",), reads=_of_trace, writes=_to_trace)


def _of_kv_events(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
    known = {"publisher", "endpoint", "topic", "enable_kv_cache_events"}
    if not isinstance(value, Mapping) or value.keys() - known:
        raise Refusal(f"expected an object of {', '.join(sorted(known))}")
    publisher = value.get("publisher", "null")
    if publisher == "null":
        return Harmless("the publisher is null: nothing is sent")
    if publisher != "zmq":
        raise Refusal("the publisher must be zmq or null")
    topic = {"engine.kv_events_topic": value["topic"]} if value.get("topic") else {}
    return {"engine.kv_events_endpoint": value.get("endpoint", "tcp://*:5557"), **topic}


def _to_kv_events(settings: Settings) -> Any:
    if "engine.kv_events_endpoint" not in settings:
        return UNSAID
    return {
        "publisher": "zmq",
        "endpoint": settings["engine.kv_events_endpoint"],
        "topic": settings.get("engine.kv_events_topic", ""),
    }


KV_EVENTS = Means(
    keys=("engine.kv_events_endpoint", "engine.kv_events_topic"),
    reads=_of_kv_events,
    writes=_to_kv_events,
)


def _of_preferred(value: Any, given: Mapping[str, Any]) -> Settings:
    if not isinstance(value, Mapping) or value.keys() - _PREFERRED.keys():
        raise Refusal(f"expected an object of {', '.join(_PREFERRED)}")
    return {f"sampling.{_PREFERRED[key]}": each for key, each in value.items()}


def _to_preferred(settings: Settings) -> Any:
    found = {
        theirs: settings[f"sampling.{ours}"]
        for theirs, ours in _PREFERRED.items()
        if settings.get(f"sampling.{ours}") is not None
    }
    return found or UNSAID


PREFERRED = Means(
    keys=tuple(f"sampling.{key}" for key in _PREFERRED.values()),
    reads=_of_preferred,
    writes=_to_preferred,
    how="also the defaults of the other APIs, and returned by /get_model_info",
)


def _of_config_file(value: str, given: Mapping[str, Any]) -> Settings:
    # `command_line.py` reads it on a command line.
    raise Refusal("write the file's options here; only a command line reads the file")


CONFIG_FILE = Means(
    keys=(),
    reads=_of_config_file,
    how="a command line reads its options, and overrides them; refused elsewhere",
)


def _of_gathering(value: bool, given: Mapping[str, Any]) -> Settings:
    size = given.get("--dynamic-batch-tokenizer-batch-size", 32)
    return {"api.tokenizer_batch_size": size if value else 1}


def _to_gathering(settings: Settings) -> Any:
    return settings.get("api.tokenizer_batch_size", 1) > 1


GATHERING = Means(keys=("api.tokenizer_batch_size",), reads=_of_gathering, writes=_to_gathering)


def _to_gathered(settings: Settings) -> Any:
    size = settings.get("api.tokenizer_batch_size", 1)
    return size if size > 1 else UNSAID


GATHERED = only_with("--enable-dynamic-batch-tokenizer", "api.tokenizer_batch_size", _to_gathered)


def _of_policy(value: str, given: Mapping[str, Any]) -> Settings:
    if value == "priority":
        return {"engine.schedule_policy": "fcfs", "engine.use_priorities": True}
    return {"engine.schedule_policy": value}


POLICY = Means(keys=("engine.schedule_policy", "engine.use_priorities"), reads=_of_policy)


def _of_log_requests(value: bool, given: Mapping[str, Any]) -> Settings:
    level = given.get("--log-requests-level", 2)
    return {"metrics.log_requests": _REQUEST_LEVELS[level] if value else "none"}


def _to_log_requests(settings: Settings) -> Any:
    return settings.get("metrics.log_requests", "none") != "none"


LOG_REQUESTS = Means(
    keys=("metrics.log_requests",), reads=_of_log_requests, writes=_to_log_requests
)


def _of_log_level(value: int, given: Mapping[str, Any]) -> Harmless | Settings:
    if not given.get("--log-requests"):
        return Harmless("it has no effect without --log-requests")
    return {"metrics.log_requests": _REQUEST_LEVELS[value]}


def _to_log_level(settings: Settings) -> Any:
    detail = settings.get("metrics.log_requests")
    return _REQUEST_LEVELS.index(detail) if detail in _REQUEST_LEVELS else UNSAID


LOG_DETAIL = Means(keys=("metrics.log_requests",), reads=_of_log_level, writes=_to_log_level)


def _of_phase(value: Any, given: Mapping[str, Any]) -> Effect | Harmless | Settings:
    others = (
        given.get("--attention-backend"),
        given.get("--prefill-attention-backend"),
        given.get("--decode-attention-backend"),
    )
    if value in NO_ATTENTION:
        raise Refusal(NO_ATTENTION[value])
    if value in ATTENTION and all(other in (None, value) for other in others):
        return Effect({"engine.attention_backend": ATTENTION[value]}, _ONE_BACKEND)
    known = ", ".join(ATTENTION)
    raise Refusal(f"not offered: two attention backends in one engine; set all to one of {known}")


_ONE_BACKEND = "prefill and decode use the same backend; two that differ are refused"
PHASE = Means(keys=("engine.attention_backend",), reads=_of_phase, writes=never, how=_ONE_BACKEND)


_TORCHAO = {
    **dict.fromkeys(("int8wo", "int8dq"), "int8"),
    **dict.fromkeys((f"int4wo-{group}" for group in (32, 64, 128, 256)), "int4_pure"),
    **dict.fromkeys(("fp8wo", "fp8dq-per_row"), "fp8"),
}


def _of_torchao(value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
    if not value:
        return Harmless("weights are not quantised")
    if value in _TORCHAO:
        wanted = _TORCHAO[value]
        return Effect({"model.quantization": wanted}, ROUNDED[wanted])
    if value == "fp8dq-per_tensor":
        raise Refusal(
            "not offered: one scale for the activations of a step makes a row depend on others; "
            "fp8dq-per_row has one for each"
        )
    raise Refusal(f"expected one of {', '.join(_TORCHAO)}")


def _to_torchao(settings: Settings) -> Any:
    known = {"int8": "int8wo", "int4_pure": "int4wo-32", "fp8": "fp8dq-per_row"}
    return known.get(settings.get("model.quantization", ""), UNSAID)


KV_SCALES = Means(keys=("engine.kv_scales_file",), reads=_of_kv_scales, writes=_to_kv_scales)
TORCHAO = Means(
    keys=("model.quantization",), reads=_of_torchao, writes=_to_torchao, how=WEIGHT_ONLY
)


def _of_priorities(value: bool, given: Mapping[str, Any]) -> Settings:
    if not value:
        return {"engine.use_priorities": False}
    # In SGLang the switch also enables preemption by the threshold.
    gap = max(0, given.get("--priority-scheduling-preemption-threshold", _THRESHOLD) - 1)
    return {"engine.use_priorities": True, "engine.priority_preemption_gap": gap}


def _to_priorities(settings: Settings) -> Any:
    if settings.get("engine.priority_preemption_gap") is not None:
        return settings.get("engine.use_priorities", True)
    return False if settings.get("engine.use_priorities") is False else UNSAID


PRIORITIES = Means(
    keys=("engine.use_priorities", "engine.priority_preemption_gap"),
    reads=_of_priorities,
    writes=_to_priorities,
)


def _of_threshold(value: int, given: Mapping[str, Any]) -> Effect | Harmless:
    if not given.get("--enable-priority-scheduling"):
        return Harmless("it has no effect without --enable-priority-scheduling")
    # SGLang preempts at the threshold, remora above the gap.
    how = "" if value >= 1 else "an equal priority never preempts"
    return Effect({"engine.priority_preemption_gap": max(0, value - 1)}, how)


def _to_threshold(settings: Settings) -> Any:
    gap = settings.get("engine.priority_preemption_gap")
    return UNSAID if gap is None else gap + 1


THRESHOLD = Means(
    keys=("engine.priority_preemption_gap",), reads=_of_threshold, writes=_to_threshold
)
