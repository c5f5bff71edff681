"""Functions for SGLang's parameters whose values are not simply the value of a key.

`of_x` reads a value, given all parameters; `to_x` writes the value for settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.dialects.rules import UNSAID, Effect, Harmless, Refusal, Settings

ATTENTION = {"triton": "triton", "torch_native": "torch"}
PREFERRED = {
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


def of_chunk(value: Any, given: Mapping[str, Any]) -> Effect | Harmless | Settings:
    """Return what `--chunked-prefill-size` means; may raise Refusal."""
    if value == -1:
        return {"engine.chunked_prefill": False}
    return {"engine.prefill_chunk_tokens": value}


def to_chunk(settings: Settings) -> Any:
    """Return the value of `--chunked-prefill-size` that says the settings."""
    if settings.get("engine.chunked_prefill") is False:
        return -1
    return settings.get("engine.prefill_chunk_tokens", UNSAID)


def of_lora(value: Any, given: Mapping[str, Any]) -> Effect | Harmless | Settings:
    """Return what `--enable-lora` means; may raise Refusal."""
    if value:
        return {"lora.dynamic": True}
    if given.get("--lora-paths"):
        raise Refusal("--lora-paths lists adapters; remove one of the two")
    return {"lora.dynamic": False}


def of_loader(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
    """Read `--model-loader-extra-config`: enable_multithread_load and num_threads."""
    if not isinstance(value, Mapping) or value.keys() - {"enable_multithread_load", "num_threads"}:
        raise Refusal("expected an object of enable_multithread_load and num_threads")
    if not value:
        return Harmless("the number of threads does not change")
    is_many = value.get("enable_multithread_load", False)
    return {"model.load_threads": value.get("num_threads", 8) if is_many else 1}


def to_loader(settings: Settings) -> Any:
    """Return the value of `--model-loader-extra-config` that says the settings."""
    threads = settings.get("model.load_threads")
    if threads is None:
        return UNSAID
    if threads == 1:
        return {"enable_multithread_load": False}
    return {"enable_multithread_load": True, "num_threads": threads}


def of_trace(value: bool, given: Mapping[str, Any]) -> Harmless | Settings:
    """Return what `--enable-trace` means; may raise Refusal."""
    if not value:
        return Harmless("no spans are sent")
    return {"metrics.trace_endpoint": given.get("--otlp-traces-endpoint", "localhost:4317")}


def to_trace(settings: Settings) -> Any:
    """Return the value of `--enable-trace` that says the settings."""
    return "metrics.trace_endpoint" in settings or UNSAID


def of_kv_events(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
    """Return what `--kv-events-config` means; may raise Refusal."""
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


def to_kv_events(settings: Settings) -> Any:
    """Return the value of `--kv-events-config` that says the settings."""
    if "engine.kv_events_endpoint" not in settings:
        return UNSAID
    return {
        "publisher": "zmq",
        "endpoint": settings["engine.kv_events_endpoint"],
        "topic": settings.get("engine.kv_events_topic", ""),
    }


def of_preferred(value: Any, given: Mapping[str, Any]) -> Settings:
    """Return what `--preferred-sampling-params` means; may raise Refusal."""
    if not isinstance(value, Mapping) or value.keys() - PREFERRED.keys():
        raise Refusal(f"expected an object of {', '.join(PREFERRED)}")
    return {f"sampling.{PREFERRED[key]}": each for key, each in value.items()}


def to_preferred(settings: Settings) -> Any:
    """Return the value of `--preferred-sampling-params` that says the settings."""
    found = {
        theirs: settings[f"sampling.{ours}"]
        for theirs, ours in PREFERRED.items()
        if settings.get(f"sampling.{ours}") is not None
    }
    return found or UNSAID


def of_config_file(value: str, given: Mapping[str, Any]) -> Settings:
    """Refuse `--config` in a file; `command_line.py` reads it on a command line."""
    raise Refusal("write the file's options here; only a command line reads the file")


def of_gathering(value: bool, given: Mapping[str, Any]) -> Settings:
    """Return what `--enable-dynamic-batch-tokenizer` means; may raise Refusal."""
    size = given.get("--dynamic-batch-tokenizer-batch-size", 32)
    return {"api.tokenizer_batch_size": size if value else 1}


def to_gathering(settings: Settings) -> Any:
    """Return the value of `--enable-dynamic-batch-tokenizer` that says the settings."""
    return settings.get("api.tokenizer_batch_size", 1) > 1


def to_gathered(settings: Settings) -> Any:
    """Return the value of `--dynamic-batch-tokenizer-batch-size` that says the settings."""
    size = settings.get("api.tokenizer_batch_size", 1)
    return size if size > 1 else UNSAID


def of_policy(value: str, given: Mapping[str, Any]) -> Settings:
    """Return what `--schedule-policy` means; may raise Refusal."""
    if value == "priority":
        return {"engine.schedule_policy": "fcfs", "engine.use_priorities": True}
    return {"engine.schedule_policy": value}


def of_log_requests(value: bool, given: Mapping[str, Any]) -> Settings:
    """Return what `--log-requests` means; may raise Refusal."""
    level = given.get("--log-requests-level", 2)
    return {"metrics.log_requests": _REQUEST_LEVELS[level] if value else "none"}


def to_log_requests(settings: Settings) -> Any:
    """Return the value of `--log-requests` that says the settings."""
    return settings.get("metrics.log_requests", "none") != "none"


def of_log_level(value: int, given: Mapping[str, Any]) -> Harmless | Settings:
    """Return what `--log-requests-level` means; may raise Refusal."""
    if not given.get("--log-requests"):
        return Harmless("it has no effect without --log-requests")
    return {"metrics.log_requests": _REQUEST_LEVELS[value]}


def to_log_level(settings: Settings) -> Any:
    """Return the value of `--log-requests-level` that says the settings."""
    detail = settings.get("metrics.log_requests")
    return _REQUEST_LEVELS.index(detail) if detail in _REQUEST_LEVELS else UNSAID


def of_phase(value: Any, given: Mapping[str, Any]) -> Effect | Harmless | Settings:
    """Return what `--prefill-attention-backend` means; may raise Refusal."""
    others = (
        given.get("--attention-backend"),
        given.get("--prefill-attention-backend"),
        given.get("--decode-attention-backend"),
    )
    if value in ATTENTION and all(other in (None, value) for other in others):
        return Effect(
            {"engine.attention_backend": ATTENTION[value]}, "prefill and decode use the same"
        )
    raise Refusal("prefill and decode use the same backend: triton or torch_native")


def of_torchao(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
    """Return what `--torchao-config` means; may raise Refusal."""
    if not value:
        return Harmless("weights are not quantised")
    if value == "int8wo":
        return {"model.quantization": "int8"}
    if str(value).startswith("int4wo"):
        return {"model.quantization": "int4"}
    raise Refusal("not yet: 8-bit floats and quantised activations; use int8wo or int4wo-32")


def to_torchao(settings: Settings) -> Any:
    """Return the value of `--torchao-config` that says the settings."""
    known = {"int8": "int8wo", "int4": "int4wo-32"}
    return known.get(settings.get("model.quantization", ""), UNSAID)
