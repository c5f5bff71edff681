"""Rules for vLLM's arguments that are objects in JSON, such as --compilation-config.

Each option of an object sets keys, has no effect here, or is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from remora.configs.dialects.vllm.engine_values import attention, no_graphs
from remora.configs.dialects.vllm.parsers import REASONING

Option = Callable[[Any], Settings]  # value of an option -> settings; raises Refusal


def _key(key: str, table: Mapping[Any, Any] | None = None) -> Option:
    """Return the option that sets `key`, with remora's values in `table`."""

    def read(value: Any) -> Settings:
        if table is None:
            return {key: value}
        if not isinstance(value, str | int | bool) or value not in table:
            raise Refusal(f"supported: {', '.join(map(str, table))}")
        return {} if table[value] is None else {key: table[value]}

    return read


def _ignored(_value: Any) -> Settings:
    return {}


def _off(why: str, *values: Any) -> Option:
    """Return the option of which only values that turn it off are accepted."""

    def read(value: Any) -> Settings:
        if value and value not in values:
            raise Refusal(why)
        return {}

    return read


def _read(value: Any, options: Mapping[str, Option]) -> dict[str, Any]:
    """Return the settings of an object. Raises Refusal that names the option."""
    if not isinstance(value, Mapping):
        raise Refusal(f"expected an object of {', '.join(options)}")
    settings: dict[str, Any] = {}
    for name, each in value.items():
        if name not in options:
            raise Refusal(f"{name}: not offered; supported: {', '.join(options)}")
        if each is not None:
            try:
                settings |= options[name](each)
            except Refusal as refusal:
                raise Refusal(f"{name}: {refusal}") from None
    return settings


def _object(
    options: Mapping[str, Option],
    keys: tuple[str, ...],
    how: str = "",
    writes: Callable[[Settings], Any] | None = None,
) -> Means:
    """Return the rule of an object whose options are independent of other arguments."""

    def read(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
        return _read(value, options) or Harmless("the options given change nothing here")

    return Means(keys=keys, reads=read, writes=writes or never, how=how)


# compilation and attention

_ROWS, _MOST, _PROMPTS = "engine.graph_rows", "engine.graph_max_rows", "engine.graph_prompt_tokens"


def _of_graph_mode(value: Any) -> Settings:
    modes: dict[str, Settings] = {
        "NONE": {_MOST: 0, _PROMPTS: 0},
        "FULL_DECODE_ONLY": {_PROMPTS: 0},
        "FULL": {},
        "FULL_AND_PIECEWISE": {},
        "PIECEWISE": {},
    }
    if str(value).upper() not in modes:
        raise Refusal(f"supported: {', '.join(modes)}")
    return modes[str(value).upper()]


_GRAPHS: Mapping[str, Option] = {
    "cudagraph_mode": _of_graph_mode,
    "cudagraph_capture_sizes": _key(_ROWS),
    "max_cudagraph_capture_size": _key(_MOST),
}
# How vLLM compiles; remora's kernels are compiled ahead, so these change no result.
_COMPILED = (
    "mode", "level", "backend", "custom_ops", "splitting_ops", "pass_config", "use_inductor",
    "use_inductor_graph_partition", "compile_sizes", "compile_ranges_endpoints", "cache_dir",
    "inductor_compile_config", "inductor_passes", "dynamic_shapes_config", "debug_dump_path",
    "compile_cache_save_format", "cudagraph_num_of_warmups", "cudagraph_copy_inputs",
    "cudagraph_specialize_lora", "fast_moe_cold_start", "ir_enable_torch_wrap", "full_cuda_graph",
)  # fmt: skip
_COMPILATION = {**_GRAPHS, **dict.fromkeys(_COMPILED, _ignored)}


def _of_compilation(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
    if isinstance(value, int):
        value = {"level": value}
    settings = _read(value, _COMPILATION)
    if no_graphs(given):
        return Harmless("CUDA graphs are off")
    return settings or Harmless("kernels are compiled ahead, and a GPU uses CUDA graphs")


def _to_compilation(settings: Settings) -> Any:
    return {"cudagraph_mode": "FULL_DECODE_ONLY"} if settings.get(_PROMPTS) == 0 else UNSAID


COMPILATION = Means(
    keys=(_ROWS, _MOST, _PROMPTS),
    reads=_of_compilation,
    writes=_to_compilation,
    how="CUDA graphs only; options of compilation have no effect",
)


def _of_attention(value: Any, given: Mapping[str, Any]) -> Effect | Harmless | Settings:
    read = {"backend": _ignored, "flash_attn_version": _ignored}
    _read(value, {**read, "flash_attn_max_num_splits_for_cuda_graph": _key("")})
    backend = value.get("backend") or given.get("--attention-backend")
    name = None if backend is None else str(backend).upper()
    splits = value.get("flash_attn_max_num_splits_for_cuda_graph")
    own: Settings = {} if splits is None else {"engine.attention_splits": splits}
    if name is None and value.get("flash_attn_version") is None:
        return Effect(own) if own else Harmless("the options given change nothing here")
    found = attention(name, value.get("flash_attn_version"))
    return found if isinstance(found, Harmless) else Effect({**found, **own})


ATTENTION = Means(
    keys=("engine.attention_backend", "engine.attention_splits"),
    reads=_of_attention,
    writes=lambda settings: (
        {
            "backend": "FLASH_ATTN",
            "flash_attn_version": int(settings["engine.attention_backend"][2]),
        }
        if settings.get("engine.attention_backend") in ("fa3", "fa4")
        else UNSAID
    ),
    how="backend, version of FlashAttention, and parts of a sequence; others are refused",
)

# constrained output, pooling


def _of_parser(value: Any) -> Settings:
    found = REASONING.read(value, {}) if value else None
    return found.settings if isinstance(found, Effect) else {}


GRAMMAR = _object(
    {
        "backend": _key(
            "grammar.backend",
            {"auto": None, "xgrammar": "xgrammar", "guidance": None, "outlines": "outlines"},
        ),
        "disable_any_whitespace": _key("grammar.json_compact"),
        "disable_additional_properties": _off("schemas mean what they say"),
        "reasoning_parser": _of_parser,
        "reasoning_parser_plugin": _off("parsers from outside the package are not loaded"),
        "enable_in_reasoning": _off("constraints begin after the reasoning"),
    },
    ("grammar.backend", "grammar.json_compact", "api.reasoning_parser"),
    "guidance and auto mean xgrammar, which supports the same constraints",
    lambda settings: (
        {"backend": settings["grammar.backend"]}
        if settings.get("grammar.backend") in ("xgrammar", "outlines")
        else UNSAID
    ),
)
_METHODS = {
    "CLS": "cls",
    "LAST": "last",
    "MEAN": "mean",
    "MAX": "max",
    "ALL": None,
    "STEP": None,
}


def _of_pooling(value: Any) -> Settings:
    return _key("pooling.method", _METHODS)(str(value).upper())


def _of_activation(value: Any) -> Settings:
    """Turn normalisation and the activation of scores off, or leave them to the checkpoint."""
    return {} if value else {"pooling.normalize": False, "pooling.activation": "none"}


POOLER = _object(
    {
        "task": _off("--runner and --convert name the task"),
        "pooling_type": _of_pooling,
        "seq_pooling_type": _of_pooling,
        "tok_pooling_type": _of_pooling,
        "use_activation": _of_activation,
        "normalize": _key("pooling.normalize"),
        "dimensions": lambda value: {"pooling.dimensions": [value]},
        "enable_chunked_processing": _off("texts longer than the context are refused"),
        "enable_flash_late_interaction": _ignored,
    },
    ("pooling.method", "pooling.normalize", "pooling.activation", "pooling.dimensions"),
    "dimensions: requests may also ask for the full size; ALL and STEP follow from the model",
    lambda settings: (
        {"pooling_type": settings["pooling.method"].upper()}
        if str(settings.get("pooling.method")).upper() in _METHODS
        else UNSAID
    ),
)

# logs, metrics, events, profiles

_LEVELS = {"CRITICAL": "ERROR", "NOTSET": "DEBUG"} | {
    level: level for level in ("ERROR", "WARNING", "INFO", "DEBUG")
}
LOGGING = _object(
    {
        "log_level": _key("metrics.log_level", _LEVELS),
        "pylogging_config_file": _key("metrics.log_config"),
        "formatter": _off("not offered: logs as JSON; set Serve's logging_config", "text"),
        "configure_logging": _ignored,
    },
    ("metrics.log_level", "metrics.log_config"),
    "remora's loggers are named remora.*",
)


def _of_lengths(value: Any) -> Settings:
    return {"metrics.prompt_token_buckets": value, "metrics.output_token_buckets": value}


BUCKETS = _object(
    {
        "request_latency": _key("metrics.request_buckets_s"),
        "time_to_first_token": _key("metrics.first_token_buckets_s"),
        "inter_token_latency": _key("metrics.inter_token_buckets_s"),
        "request_tokens": _of_lengths,
    },
    (
        "metrics.request_buckets_s",
        "metrics.first_token_buckets_s",
        "metrics.inter_token_buckets_s",
        "metrics.prompt_token_buckets",
        "metrics.output_token_buckets",
    ),
    "families of histograms that remora does not have are refused",
    lambda settings: (
        {"request_latency": settings["metrics.request_buckets_s"]}
        if settings.get("metrics.request_buckets_s")
        else UNSAID
    ),
)
_EVENTS, _TOPIC = "engine.kv_events_endpoint", "engine.kv_events_topic"
_EVENT_OPTIONS: Mapping[str, Option] = {
    "enable_kv_cache_events": _ignored,
    "publisher": _key("", {"zmq": None, "null": None}),
    "endpoint": _key(_EVENTS),
    "topic": _key(_TOPIC),
    "replay_endpoint": _off("not offered: sending events again"),
    "buffer_steps": _ignored,
    "hwm": _ignored,
    "max_queue_size": _ignored,
}


def _of_events(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
    settings = _read(value, _EVENT_OPTIONS)
    is_on = bool(value.get("enable_kv_cache_events"))
    if not is_on or value.get("publisher", "zmq") == "null":
        return Harmless("events are off, as in vLLM without enable_kv_cache_events")
    return {_EVENTS: "tcp://*:5557", **settings}


def _to_events(settings: Settings) -> Any:
    if _EVENTS not in settings:
        return UNSAID
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": settings[_EVENTS],
        "topic": settings.get(_TOPIC, ""),
    }


EVENTS = Means(keys=(_EVENTS, _TOPIC), reads=_of_events, writes=_to_events)
PROFILER = _object(
    {
        "profiler": _key("", {"torch": None}),
        "torch_profiler_dir": _key("debug.profile_dir"),
        **dict.fromkeys(
            (
                "torch_profiler_with_stack",
                "torch_profiler_with_flops",
                "torch_profiler_use_gzip",
                "torch_profiler_record_shapes",
                "torch_profiler_with_memory",
                "torch_profiler_dump_cuda_time_total",
                "ignore_frontend",
            ),
            _ignored,
        ),
    },
    ("debug.profile_dir",),
    "torch's profiler, with remora's own choice of details",
    lambda settings: (
        {"profiler": "torch", "torch_profiler_dir": settings["debug.profile_dir"]}
        if settings.get("debug.profile_dir")
        else UNSAID
    ),
)


def _of_watchdog(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
    options = {"timeout": _ignored, "check_interval": _ignored, "dump_dir": _ignored}
    _read(value, options)
    if not value.get("dump_dir"):
        return Harmless("without dump_dir it is off in vLLM; engine.step_timeout_s applies")
    return {"engine.step_timeout_s": float(value.get("timeout", 300))}


WATCHDOG = Means(
    keys=("engine.step_timeout_s",),
    reads=_of_watchdog,
    writes=never,
    how="a replica whose step takes longer is replaced; stacks go to its log, not to dump_dir",
)
