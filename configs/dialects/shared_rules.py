"""Rules that several dialects share: parsers, secrets, number formats, revisions of the hub."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from remora.configs.dialects.rules import (
    UNSAID,
    Harmless,
    Means,
    NoEffect,
    Refusal,
    Sets,
    Settings,
    never,
)
from remora.configs.model_names import HubModel, parse_model_name

REASONING = Sets(key="api.reasoning_parser", table={"deepseek-v3": "deepseek_v3"})
TOOLS = Sets(
    key="api.tool_parser",
    table={
        "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v31",
        "deepseekv32": "deepseek_v32",
        "glm": "glm45",
    },
)
COMPILE = Sets(
    key="engine.compile",
    how="compiles decode steps of torch operations; native CPU kernels need no compilation",
)
FP8 = "a scale for each output, and for each row of activations; on a GPU only"
ROUNDED: Mapping[str, str] = {
    "none": "",
    "int8": "groups of 32 inputs (64 with AMX), and the head too, on a CPU; a scale for each "
    "output on a GPU",
    "int4_pure": "groups of 32 inputs; the head in int8; on a CPU only",
    "fp8": FP8,
}
WEIGHT_ONLY = f"int8: {ROUNDED['int8']}; int4: {ROUNDED['int4_pure']}; float8: {FP8}"
DTYPE = Sets(
    key="model.dtype",
    table={
        "half": "float16",
        "float": "float32",
        "fp16": "float16",
        "bf16": "bfloat16",
        "fp32": "float32",
    },
    hows={"auto": "the checkpoint's own; float32 is not converted to float16"},
)
TRUST_CODE = Sets(
    key="model.trust_remote_code", how="only code in the checkpoint's directory; no downloads"
)
TOKENIZER_MODE = NoEffect(
    "the fast tokenizer is always used; a checkpoint that has only one in Python is refused",
    only=("auto", "fast"),
    otherwise="not offered: tokenizers in Python; leave it out, fast ones give the same ids",
)
LEVELS = {
    "debug": "DEBUG",
    "info": "INFO",
    "warning": "WARNING",
    "error": "ERROR",
    "critical": "ERROR",
    "warn": "WARNING",
    "WARN": "WARNING",
}
CRITICAL = {"critical": "ERROR, the highest level in use"}
LOG_LEVEL = Sets(key="metrics.log_level", table=LEVELS, hows=CRITICAL)


_MAX_EDGE = 1e12


def memory_share(tokens: str) -> Means:
    """Return the rule of a memory fraction, without effect if `tokens` sets the KV cache."""

    def read(value: float, given: Mapping[str, Any]) -> Harmless | Settings:
        if given.get(tokens):
            return Harmless(f"{tokens} sets the size of the KV cache")
        return {"engine.total_mem_fraction": value}

    return Means(
        keys=("engine.total_mem_fraction",), reads=read, how="includes the memory of a step"
    )


def only_with(switch: str, key: str, writes: Callable[[Settings], Any] | None = None) -> Means:
    """Return the rule of a parameter that sets `key`, and has no effect without `switch`."""

    def read(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
        if not given.get(switch):
            return Harmless(f"it has no effect without {switch}")
        return {key: value}

    return Means(keys=(key,), reads=read, writes=writes)


def no_graphs(limit: str) -> Means:
    """Return the rule of a switch that turns CUDA graphs off, and contradicts `limit`."""

    def read(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
        if not value:
            return Harmless("a GPU uses CUDA graphs by default")
        if given.get(limit):
            raise Refusal(f"{limit} enables graphs; keep one of the two")
        return {"engine.graph_max_rows": 0}

    return Means(
        keys=("engine.graph_max_rows",),
        reads=read,
        writes=lambda settings: True if settings.get("engine.graph_max_rows") == 0 else UNSAID,
    )


def edges(key: str) -> Means:
    """Return the rule of bucket edges: default, tse MIDDLE BASE COUNT, or custom EDGE..."""

    def read(value: list[str], given: Mapping[str, Any]) -> Harmless | Settings:
        kind, *texts = value or ["default"]
        try:
            numbers = [float(text) for text in texts]
        except ValueError:
            raise Refusal(f"expected numbers after {kind}") from None
        if kind == "default":
            return Harmless("remora's default edges are used")
        if kind == "custom" and numbers:
            return {key: sorted(set(numbers))}
        if kind == "tse" and len(numbers) == 3:
            middle, base, count = numbers
            if not (0 <= middle <= _MAX_EDGE and base > 1 and count in range(1, 257)):
                raise Refusal(
                    f"tse: MIDDLE must be 0 to {_MAX_EDGE:g}, BASE above 1, COUNT 1 to 256"
                )
            if math.ceil(count / 2) * math.log(base) > math.log(_MAX_EDGE):
                raise Refusal(f"tse: edges would exceed {_MAX_EDGE:g}; reduce COUNT or BASE")
            return {key: two_sided_exponential(middle, base, int(count))}
        raise Refusal("expected default, tse MIDDLE BASE COUNT, or custom followed by the edges")

    def write(settings: Settings) -> Any:
        found = settings.get(key)
        return UNSAID if found is None else ["custom", *(str(edge) for edge in found)]

    return Means(keys=(key,), reads=read, writes=write)


def two_sided_exponential(middle: float, base: float, count: int) -> list[float]:
    """Return about `count` edges at distances of base, base**2, ... from `middle`, none below 0."""
    distances = [base**power for power in range(1, math.ceil(count / 2) + 1)]
    below = [max(0.0, middle - distance) for distance in distances]
    above = [middle + distance for distance in distances]
    return sorted({*below, middle, *above})


def secret(key: str) -> Means:
    """Return the rule of an API key, which must be given by reference."""

    def read(value: Any, given: Mapping[str, Any]) -> Settings:
        if str(value).startswith(("env:", "file:")):
            return {key: value}
        raise Refusal(
            "a secret must not be in a configuration; put it into a variable or a file and write "
            "env:NAME or file:/path"
        )

    return Means(keys=(key,), reads=read)


def _of_loader(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
    if not isinstance(value, Mapping) or value.keys() - {"enable_multithread_load", "num_threads"}:
        raise Refusal("expected an object of enable_multithread_load and num_threads")
    if not value:
        return Harmless("the number of threads does not change")
    is_many = value.get("enable_multithread_load", False)
    return {"model.load_threads": value.get("num_threads", 8) if is_many else 1}


def _to_loader(settings: Settings) -> Any:
    threads = settings.get("model.load_threads")
    if threads is None:
        return UNSAID
    if threads == 1:
        return {"enable_multithread_load": False}
    return {"enable_multithread_load": True, "num_threads": threads}


LOADER = Means(keys=("model.load_threads",), reads=_of_loader, writes=_to_loader)


def at_revision(name: str, revision: str | None) -> str:
    """Return the name of a model of the hub at a revision. Raises Refusal."""
    if revision is None:
        return name
    model = parse_model_name(name)
    if not isinstance(model, HubModel) or Path(name).expanduser().exists():
        raise Refusal(f"{name} is no model of the hub: only OWNER/NAME has revisions")
    return model.at(revision).text


def named_at(key: str, revision: str) -> Means:
    """Return the rule of an argument with the name of what `key` is; `revision`: its revision's."""

    def read(value: str, given: Mapping[str, Any]) -> Settings:
        try:
            return {key: at_revision(value, given.get(revision))}
        except Refusal:  # reported once, at the revision
            return {key: value}

    return Means(keys=(key,), reads=read)


def revision_of(key: str, *names: str) -> Means:
    """Return the rule of a revision; the first of the arguments `names` that is given is meant."""

    def read(value: str, given: Mapping[str, Any]) -> Settings:
        name = next((given[name] for name in names if given.get(name)), "the model")
        return {key: at_revision(name, value)}

    return Means(keys=(key,), reads=read, writes=never)
