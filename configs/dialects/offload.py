"""Rules for weights in host memory, of SGLang and vLLM: by their bytes, or by groups of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.dialects.rules import (
    UNSAID,
    Harmless,
    Means,
    NoEffect,
    Refusal,
    Refused,
    Rule,
    Settings,
)

_GIB = 2**30
_BYTES, _GROUP = "--cpu-offload-gb", "--offload-group-size"
_HOST_MEMORY, _SIZE = "offload.host_memory", "offload.group_size"
_NO_GROUPS = "there are no groups of layers"
_WHOLE = "whole layers, evenly spread, and copied to buffers that count as memory of weights"
_OFF = "all weights are in the device's memory"
_NO_NAMES = Refused(
    "not offered: single weights in host memory; those of a layer are there together"
)


def _is_grouped(given: Mapping[str, Any]) -> bool:
    return int(given.get(_GROUP) or 0) > 0


def _of_bytes(value: float, given: Mapping[str, Any]) -> Harmless | Settings:
    if value <= 0:
        return Harmless(_OFF)
    if _is_grouped(given):
        raise Refusal(f"{_GROUP} is set too; keep one of the two")
    return {_HOST_MEMORY: round(value * _GIB)}


def _to_bytes(settings: Settings) -> Any:
    held = settings.get(_HOST_MEMORY)
    return UNSAID if held is None or held % _GIB else held // _GIB


def _of_group(value: int, given: Mapping[str, Any]) -> Harmless | Settings:
    return {_SIZE: value} if value > 0 else Harmless(_OFF)


def _with_groups(key: str) -> Means:
    """Return the rule of a parameter of groups, which has no effect without them."""

    def read(value: int, given: Mapping[str, Any]) -> Harmless | Settings:
        return {key: value} if _is_grouped(given) else Harmless(f"{_NO_GROUPS}: set {_GROUP}")

    def write(settings: Settings) -> Any:
        return UNSAID if settings.get(_SIZE) is None else settings.get(key, UNSAID)

    return Means(keys=(key,), reads=read, writes=write)


_BOTH: Mapping[str, Rule] = {
    _BYTES: Means(keys=(_HOST_MEMORY,), reads=_of_bytes, writes=_to_bytes, how=_WHOLE),
    _GROUP: Means(keys=(_SIZE,), reads=_of_group),
    "--offload-num-in-group": _with_groups("offload.num_in_group"),
    "--offload-prefetch-step": _with_groups("offload.prefetch_layers"),
}
SGLANG: Mapping[str, Rule] = {
    **_BOTH,
    "--offload-mode": NoEffect(
        "weights are in page-locked memory of each rank's process",
        only=("cpu",),
        otherwise="not offered: offloaded weights in shared memory, on other GPUs, or nowhere; "
        "supported: cpu",
    ),
}
VLLM: Mapping[str, Rule] = {
    **_BOTH,
    "--offload-backend": NoEffect("weights are always copied to buffers ahead; same outputs"),
    "--cpu-offload-params": _NO_NAMES,
    "--offload-params": _NO_NAMES,
}
