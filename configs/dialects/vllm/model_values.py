"""Rules for vLLM's arguments of the model, its files and default sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remora.configs.dialects.rules import (
    UNSAID,
    Effect,
    Harmless,
    Means,
    Refusal,
    Sets,
    Settings,
    never,
)
from remora.configs.dialects.shared_rules import ROUNDED

# model


def _of_names(value: Sequence[str], given: Mapping[str, Any]) -> Settings:
    if len(value) != 1:
        raise Refusal(
            f"not offered: several names of a model; give {value[0] if value else 'one'}, and with "
            "api.any_model_name requests may use any"
        )
    return {"model.served_name": value[0]}


def _to_names(settings: Settings) -> Any:
    name = settings.get("model.served_name")
    return [name] if name else UNSAID


NAMES = Means(keys=("model.served_name",), reads=_of_names, writes=_to_names)


def _of_length(value: int, given: Mapping[str, Any]) -> Harmless | Settings:
    if value == -1:
        return Harmless("the model's own limit, also where the KV cache holds fewer tokens")
    return {"model.context_length": value}


LENGTH = Means(keys=("model.context_length",), reads=_of_length)


def _of_template(value: str, given: Mapping[str, Any]) -> Settings:
    if "{{" in value or "{%" in value:
        raise Refusal("write the template into a file, and give its path")
    return {"model.chat_template": value}


TEMPLATE = Means(
    keys=("model.chat_template",),
    reads=_of_template,
    how="a file, or the name of one of the checkpoint's templates",
)


def _of_runner(value: str, given: Mapping[str, Any]) -> Harmless | Settings:
    if value == "draft":
        raise Refusal("a draft model runs within the engine of its model: --speculative-config")
    if value == "auto" or given.get("--convert") in ("embed", "classify"):
        return Harmless("the checkpoint or --convert decides")
    return {"model.task": "generate" if value == "generate" else "embed"}


def _to_runner(settings: Settings) -> Any:
    return {"generate": "generate", "embed": "pooling"}.get(settings.get("model.task", ""), UNSAID)


RUNNER = Means(
    keys=("model.task",),
    reads=_of_runner,
    writes=_to_runner,
    how="pooling means embeddings unless --convert says otherwise; models with a score head need "
    "no flag",
)
CONVERT = Sets(
    key="model.task",
    table={"embed": "embed", "classify": "classify"},
    strict=True,
    unset={"auto": "the checkpoint decides", "none": "the checkpoint decides"},
)

TASK = Sets(
    key="model.task",
    table={
        "generate": "generate",
        "embed": "embed",
        "embedding": "embed",
        "classify": "classify",
        "score": "rerank",
        "reward": "reward",
    },
    strict=True,
    unset={"auto": "the checkpoint decides"},
)
_CONFIG_FOLDER = "--hf-config-path"
_ENTRIES = {"--rope-scaling": "rope_scaling", "--rope-theta": "rope_theta"}


def _of_config(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
    """Read all entries of config.json from each argument that replaces one."""
    own = given.get("--hf-overrides") or {}
    if not isinstance(own, Mapping):
        raise Refusal("expected an object of entries of config.json")
    entries = _of_file(given[_CONFIG_FOLDER]) if given.get(_CONFIG_FOLDER) else {}
    entries |= {entry: given[name] for name, entry in _ENTRIES.items() if given.get(name)}
    if not own and not entries:
        return Harmless("no entry is replaced")
    return {"model.config_overrides": {**entries, **own}}


def _of_file(folder: str) -> dict[str, Any]:
    """Return the entries of another config.json. Raises Refusal."""
    file = Path(folder).expanduser() / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"{file} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise Refusal(f"{file} is not an object")
    return found


CONFIG = Means(keys=("model.config_overrides",), reads=_of_config)
CONFIG_FOLDER = Means(
    keys=("model.config_overrides",),
    reads=_of_config,
    writes=never,
    how="a folder of this machine; its entries replace those of the model's own file",
)


def rope(entry: str) -> Means:
    """Return the rule of an argument that replaces one entry of config.json."""
    return Means(
        keys=("model.config_overrides",),
        reads=_of_config,
        writes=never,
        how=f"the entry {entry} of config.json",
    )


# The formats of checkpoints that values of --quantization mean; some name a kernel, too.
_FORMATS = {
    "awq": ["awq"],
    "auto_awq": ["awq"],
    "awq_marlin": ["awq"],
    "gptq": ["gptq"],
    "auto_gptq": ["gptq"],
    "gptq_marlin": ["gptq"],
    "moe_wna16": ["awq", "gptq"],
    "inc": ["auto-round"],
    "fp8": ["fp8"],
    "fbgemm_fp8": ["fbgemm-fp8"],
    "modelopt": ["modelopt"],
    "modelopt_fp4": ["modelopt"],
    "modelopt_mixed": ["modelopt"],
    "compressed-tensors": ["compressed-tensors"],
    "torchao": ["torchao"],
    "mxfp4": ["mxfp4"],
    "gpt_oss_mxfp4": ["mxfp4"],
    "bitsandbytes": ["bitsandbytes"],
}
# Formats to which weights are rounded while they load.
_ROUNDED = {"fp8_per_channel": "fp8", "int8_per_channel_weight_only": "int8"}
_GGUF = "blocks that native CPU kernels know are computed as stored, others dequantised"
_CHECKPOINTS = (
    "a checkpoint in this format; others are refused, not rounded (model.quantization rounds)"
)


def _of_quantization(value: str, given: Mapping[str, Any]) -> Effect:
    """Name the checkpoint's format, which is compared with the checkpoint at start-up."""
    if value == "gguf":
        return Effect({"model.load_format": "gguf"}, _GGUF)
    if value in _ROUNDED:
        ours = _ROUNDED[value]
        return Effect({"model.quantization": ours}, ROUNDED[ours])
    if value not in _FORMATS:
        known = ", ".join(("gguf", *_ROUNDED, *_FORMATS))
        raise Refusal(f"not offered; supported: {known}")
    how = _CHECKPOINTS if value in ("fp8", "bitsandbytes") else ""
    return Effect({"model.checkpoint_formats": _FORMATS[value]}, how)


def _to_quantization(settings: Settings) -> Any:
    if settings.get("model.load_format") == "gguf":
        return "gguf"
    rounded = {ours: theirs for theirs, ours in _ROUNDED.items()}
    if settings.get("model.quantization") in rounded:
        return rounded[settings["model.quantization"]]
    wanted = settings.get("model.checkpoint_formats")
    return next((name for name, formats in _FORMATS.items() if formats == wanted), UNSAID)


QUANTIZATION = Means(
    keys=("model.checkpoint_formats", "model.quantization", "model.load_format"),
    reads=_of_quantization,
    writes=_to_quantization,
    how="the checkpoint must have this format; fp8_per_channel and int8_per_channel_weight_only "
    "round while it loads; others are refused",
)
LOAD_FORMAT = Sets(
    key="model.load_format",
    table={
        "auto": "auto",
        "hf": "auto",
        "safetensors": "safetensors",
        "pt": "pt",
        "dummy": "dummy",
        "gguf": "gguf",
        "bitsandbytes": "auto",
        "fastsafetensors": "safetensors",
        "instanttensor": "safetensors",
        "runai_streamer": "safetensors",
    },
    strict=True,
    hows={
        "auto": "does not fall back to pickled files; use pt for them",
        "bitsandbytes": "checkpoints of bitsandbytes are recognised; others are not rounded",
        **dict.fromkeys(
            ("fastsafetensors", "instanttensor", "runai_streamer"),
            "remora's own reader of safetensors files, in model.load_threads threads",
        ),
    },
    otherwise="not offered: this format or store",
)


STRATEGY = Sets(
    key="model.mmap",
    table={"lazy": True, "eager": False, "prefetch": True},
    strict=True,
    hows={"prefetch": "files are mapped, and read ahead by model.load_threads threads only"},
    otherwise="not offered: torchao's tensor subclasses; its checkpoints are read without it",
)


def _of_prefetch(value: int, given: Mapping[str, Any]) -> Harmless | Settings:
    if given.get("--safetensors-load-strategy") != "prefetch":
        return Harmless("it has no effect without --safetensors-load-strategy prefetch")
    return {"model.load_threads": value}


PREFETCH = Means(
    keys=("model.load_threads",),
    reads=_of_prefetch,
    writes=never,
    how="the threads that load weights, up to 64",
)

# sampling

# What vLLM's own defaults mean, where a checkpoint's generation_config.json is not used.
_NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_PARAMETERS = {
    **{name: name for name in _NEUTRAL},
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
}
_OVERRIDES = "--override-generation-config"


def _overridden(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or value.keys() - _PARAMETERS.keys():
        raise Refusal(f"expected an object of {', '.join(_PARAMETERS)}")
    ours = {f"sampling.{_PARAMETERS[name]}": each for name, each in value.items()}
    if ours.get("sampling.top_k") == -1:
        ours["sampling.top_k"] = 0
    return ours


def _of_overrides(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
    return _overridden(value) or Harmless("no parameter is given")


def _to_overrides(settings: Settings) -> Any:
    found = {
        theirs: settings[f"sampling.{ours}"]
        for theirs, ours in _PARAMETERS.items()
        if theirs != "max_new_tokens" and settings.get(f"sampling.{ours}") is not None
    }
    return found or UNSAID


OVERRIDES = Means(
    keys=tuple(f"sampling.{key}" for key in dict.fromkeys(_PARAMETERS.values())),
    reads=_of_overrides,
    writes=_to_overrides,
    how="also the defaults of the other APIs",
)


def _of_generation(value: str, given: Mapping[str, Any]) -> Effect | Harmless:
    if value == "auto":
        return Harmless("defaults come from the checkpoint's generation_config.json")
    if value != "vllm":
        raise Refusal(
            "another folder's defaults are not read; write them into the section sampling"
        )
    own = _overridden(given.get(_OVERRIDES) or {})
    neutral = {f"sampling.{name}": each for name, each in _NEUTRAL.items()}
    return Effect({key: each for key, each in neutral.items() if key not in own})


GENERATION = Means(
    keys=tuple(f"sampling.{key}" for key in _NEUTRAL), reads=_of_generation, writes=never
)
