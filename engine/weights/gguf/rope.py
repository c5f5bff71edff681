"""Reads the rope settings of a GGUF file under config.json's keys.

Some are stored as tensors: one tensor of divisors is Llama 3's scaling, evaluated; two are
longrope's, up to the original length and beyond it.
"""

from __future__ import annotations

from typing import Any

from remora.engine.weights.gguf.family import decimal, shortest, whole
from remora.engine.weights.gguf.file import GGUFFile
from remora.engine.weights.gguf.names import LONG_DIVISORS, ROPE_DIVISORS, SHORT_DIVISORS

YARN_KEYS = {
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def rope_of(file: GGUFFile, size: int, *, theta: float = 10_000.0) -> dict[str, Any]:
    """Return rope_parameters.

    size:   elements of a head, of which `rope.dimension_count` are rotated
    theta:  default if the file has none
    """
    rope: dict[str, Any] = {
        "rope_theta": decimal(file, "rope.freq_base", theta),
        "partial_rotary_factor": whole(file, "rope.dimension_count", size) / size,
    }
    divisors = {
        tensor.name: tensor.read().tolist()
        for tensor in file.tensors
        if tensor.name in (ROPE_DIVISORS, SHORT_DIVISORS, LONG_DIVISORS)
    }
    kind = file.setting("rope.scaling.type", "none")
    if ROPE_DIVISORS in divisors:
        return rope | {"rope_type": "divided", "divisors": divisors[ROPE_DIVISORS]}
    if LONG_DIVISORS in divisors:
        return rope | _longrope(file, divisors)
    if kind == "none":
        return rope | {"rope_type": "default"}
    rope |= {"rope_type": kind, "factor": file.setting("rope.scaling.factor")}
    if kind == "yarn":
        original = file.setting("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = original
        said = {ours: file.setting(f"rope.scaling.{key}") for ours, key in YARN_KEYS.items()}
        rope |= {ours: shortest(value) for ours, value in said.items() if value is not None}
    return rope


def _longrope(file: GGUFFile, divisors: dict[str, list[float]]) -> dict[str, Any]:
    longest = whole(file, "context_length")
    original = whole(file, "rope.scaling.original_context_length", longest)
    factor = file.setting("rope.scaling.attn_factor")
    return {
        "rope_type": "longrope",
        "short_factor": divisors.get(SHORT_DIVISORS, []),
        "long_factor": divisors[LONG_DIVISORS],
        "factor": longest / original,
        "original_max_position_embeddings": original,
        **({} if factor is None else {"attention_factor": factor}),
    }
