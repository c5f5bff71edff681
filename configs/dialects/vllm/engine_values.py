"""Rules for vLLM's arguments of memory, scheduling, graphs and attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

_PAGE = 16  # tokens; vLLM's default on GPUs, and remora's
_PAGES, _BYTES = "--num-gpu-blocks-override", "--kv-cache-memory-bytes"

# memory


def _of_share(value: float, given: Mapping[str, Any]) -> Harmless | Settings:
    for name in (_BYTES, _PAGES):
        if given.get(name):
            return Harmless(f"{name} sets the size of the KV cache")
    return {"engine.total_mem_fraction": value}


SHARE = Means(
    keys=("engine.total_mem_fraction",),
    reads=_of_share,
    how="of the device's memory, on a CPU of the machine's; includes the memory of a step",
)


def _of_pages(value: int, given: Mapping[str, Any]) -> Settings:
    return {"engine.kv_tokens": value * (given.get("--block-size") or _PAGE)}


def _to_pages(settings: Settings) -> Any:
    tokens, page = settings.get("engine.kv_tokens"), settings.get("engine.page_size", _PAGE)
    return UNSAID if tokens is None or tokens % page else tokens // page


PAGES = Means(
    keys=("engine.kv_tokens",),
    reads=_of_pages,
    writes=_to_pages,
    how="pages of --block-size tokens, by default 16",
)
_SCALES = "with a scale for each token and head where the checkpoint has none"
KV_DTYPE = Sets(
    key="engine.kv_dtype",
    table={
        "auto": "auto",
        "float16": "float16",
        "bfloat16": "bfloat16",
        "fp8": "fp8_e4m3",
        "fp8_e4m3": "fp8_e4m3",
        "fp8_e5m2": "fp8_e5m2",
        "fp8_per_token_head": "fp8_e4m3",
        "int8_per_token_head": "int8",
    },
    strict=True,
    hows={"fp8": _SCALES, "fp8_e4m3": _SCALES, "fp8_e5m2": _SCALES},
    otherwise="not offered: K and V in this format",
)


def _of_layers(value: Sequence[str], given: Mapping[str, Any]) -> Harmless | Settings:
    if not value:
        return Harmless("no layer is named")
    if not all(layer.isdecimal() for layer in value):
        raise Refusal("expected the numbers of layers, counted from 0; kinds are not offered")
    return {"engine.kv_dtype_skip_layers": [int(layer) for layer in value]}


def _to_layers(settings: Settings) -> Any:
    layers = settings.get("engine.kv_dtype_skip_layers")
    return [str(layer) for layer in layers] if layers else UNSAID


SKIPPED = Means(
    keys=("engine.kv_dtype_skip_layers",),
    reads=_of_layers,
    writes=_to_layers,
    how="numbers of layers, not their kinds",
)

# scheduling

_STEP, _PLANNED = "--max-num-batched-tokens", "--max-num-scheduled-tokens"
_ROWS, _ACTIVE = "--max-num-seqs", "--max-num-active-seqs"


def _at_most(name: str, smaller: str, key: str) -> Means:
    """Return the rule of a limit of `key` that `smaller` may lower."""

    def read(value: int, given: Mapping[str, Any]) -> Harmless | Settings:
        other = given.get(smaller)
        if other is not None and other > value:
            raise Refusal(f"{smaller} is {other}; it must not be above {name}")
        return Harmless(f"{smaller} is the limit") if other is not None else {key: value}

    return Means(keys=(key,), reads=read)


STEP = _at_most(_STEP, _PLANNED, "engine.max_step_tokens")
ROWS = _at_most(_ROWS, _ACTIVE, "engine.max_running_requests")
PLANNED = Means(
    keys=("engine.max_step_tokens",),
    reads=lambda value, given: {"engine.max_step_tokens": value},
    writes=never,
    how=f"the same limit as {_STEP}, drafts included",
)
ACTIVE = Means(
    keys=("engine.max_running_requests",),
    reads=lambda value, given: {"engine.max_running_requests": value},
    writes=never,
    how=f"the same limit as {_ROWS}",
)


def _of_policy(value: str, given: Mapping[str, Any]) -> Settings:
    if value == "fcfs":
        return {"engine.use_priorities": False}
    return {"engine.use_priorities": True, "engine.low_priority_first": True}


def _to_policy(settings: Settings) -> Any:
    if settings.get("engine.use_priorities") is False:
        return "fcfs"
    return "priority" if settings.get("engine.low_priority_first") else UNSAID


POLICY = Means(
    keys=("engine.use_priorities", "engine.low_priority_first"),
    reads=_of_policy,
    writes=_to_policy,
)
CHUNK = Sets(
    key="engine.prefill_chunk_tokens",
    unset={0: "a prompt may fill a step"},
    how="of every prompt",
)

_MODES: Mapping[str, Settings] = {
    "throughput": {"engine.max_running_requests": 512, "engine.max_step_tokens": 16_384},
    "interactivity": {"engine.graph_fine": 1, "engine.graph_split": 32},
}


def _of_mode(value: str, given: Mapping[str, Any]) -> Harmless | Settings:
    if value not in _MODES:
        return Harmless("remora's own defaults")
    limits = {
        "engine.max_running_requests": (_ROWS, _ACTIVE),
        "engine.max_step_tokens": (_STEP, _PLANNED),
    }
    return {
        key: setting
        for key, setting in _MODES[value].items()
        if not any(name in given for name in limits.get(key, ()))
    } or Harmless("other arguments set the limits")


MODE = Means(
    keys=tuple(key for settings in _MODES.values() for key in settings),
    reads=_of_mode,
    writes=never,
    how="throughput: up to 512 rows and 16,384 tokens in a step; interactivity: CUDA graphs of "
    "each number of rows up to 32",
)

# graphs and attention

_EAGER = "--enforce-eager"
_NO_GRAPHS = {"engine.graph_max_rows": 0, "engine.graph_prompt_tokens": 0}


def no_graphs(given: Mapping[str, Any]) -> bool:
    """Return whether other arguments turn CUDA graphs off."""
    return bool(given.get(_EAGER)) or str(given.get("--optimization-level", "")) in ("0", "O0")


def _of_eager(value: bool, given: Mapping[str, Any]) -> Harmless | Settings:
    return _NO_GRAPHS if value else Harmless("a GPU uses CUDA graphs by default")


def _to_eager(settings: Settings) -> Any:
    return True if settings.items() >= _NO_GRAPHS.items() else UNSAID


EAGER = Means(
    keys=("engine.graph_max_rows", "engine.graph_prompt_tokens"),
    reads=_of_eager,
    writes=_to_eager,
    how="CUDA graphs only: on a CPU native step programs run in any case",
)


def _of_level(value: str, given: Mapping[str, Any]) -> Effect | Harmless:
    level = value.removeprefix("O")
    if level not in ("0", "1", "2", "3"):
        raise Refusal("expected 0, 1, 2 or 3")
    if level == "0":
        return Effect(_NO_GRAPHS)
    return Harmless("kernels are compiled ahead, and a GPU uses CUDA graphs")


LEVEL = Means(
    keys=("engine.graph_max_rows", "engine.graph_prompt_tokens"),
    reads=_of_level,
    writes=never,
    how="0 turns CUDA graphs off; the others are alike",
)


def graphs(key: str) -> Means:
    """Return the rule of sizes of CUDA graphs, which have no effect if graphs are off."""

    def read(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
        if no_graphs(given):
            return Harmless("CUDA graphs are off")
        return {key: value}

    return Means(keys=(key,), reads=read)


_BACKENDS = {
    "TRITON_ATTN": "triton",
    "TRITON_MLA": "triton",
    "FLASHINFER": "flashinfer",
    "TORCH_SDPA": "torch",
}
_VERSIONS = {2: "fa2", 3: "fa3", 4: "fa4"}
_OWN_CPU = "native CPU kernels attend on a CPU (engine.cpu_kernels)"


def attention(name: str | None, version: int | None) -> Settings | Harmless:
    """Return the settings of a backend and a version of FlashAttention. Raises Refusal."""
    if version is not None and version not in _VERSIONS:
        raise Refusal(f"flash_attn_version: supported: {', '.join(map(str, _VERSIONS))}")
    if name in ("CPU_ATTN", "CPU_MLA", "AMX_MLA"):
        return Harmless(_OWN_CPU)
    if name == "FLASH_ATTN" or (name is None and version is not None):
        return {"engine.attention_backend": _VERSIONS[version or 2]}
    if name in _BACKENDS:
        return {"engine.attention_backend": _BACKENDS[name]}
    known = ", ".join((*_BACKENDS, "FLASH_ATTN"))
    raise Refusal(f"not offered: these attention kernels; supported: {known}")


def _of_backend(value: str, given: Mapping[str, Any]) -> Harmless | Settings:
    if value.lower() == "auto":
        return Harmless("Triton's kernels attend on a GPU")
    options = given.get("--attention-config") or {}
    return attention(value.upper(), options.get("flash_attn_version"))


def _to_backend(settings: Settings) -> Any:
    ours = settings.get("engine.attention_backend")
    names = {"triton": "TRITON_ATTN", "flashinfer": "FLASHINFER", "torch": "TORCH_SDPA"}
    return names.get(ours or "", "FLASH_ATTN" if ours == "fa2" else UNSAID)


BACKEND = Means(
    keys=("engine.attention_backend",),
    reads=_of_backend,
    writes=_to_backend,
    how="FLASH_ATTN is FlashAttention 2 unless --attention-config names a version; other libraries "
    "are refused",
)

# parallel


def _of_numa(value: bool, given: Mapping[str, Any]) -> Harmless | Settings:
    if value and not given.get("--numa-bind-nodes"):
        raise Refusal("name the nodes: --numa-bind-nodes, one for each rank")
    return Harmless("--numa-bind-nodes binds ranks, with or without it")


NUMA = Means(keys=(), reads=_of_numa, writes=never, why="it needs --numa-bind-nodes")


def _of_experts(value: bool, given: Mapping[str, Any]) -> Harmless:
    if value and (given.get("--data-parallel-size") or 1) > 1:
        raise Refusal(
            "not yet: experts divided over data-parallel ranks; use --tensor-parallel-size"
        )
    return Harmless(_DIVIDED)


_DIVIDED = "--tensor-parallel-size divides experts like other layers; same outputs"
EXPERTS = Means(
    keys=(), reads=_of_experts, writes=never, why=f"{_DIVIDED}; refused with data parallelism"
)


def _of_local(value: int, given: Mapping[str, Any]) -> Harmless:
    if value != (given.get("--data-parallel-size") or 1):
        raise Refusal(_PLACES)
    return Harmless(_PLACES)


_PLACES = "Ray places replicas on nodes; --data-parallel-size is their number"
LOCAL = Means(keys=(), reads=_of_local, writes=never, why=_PLACES)
