"""Launches of layers of experts, as Qwen3-30B-A3B and DeepSeek-V3 make them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from remora.kernels.gpu.arch import has_fp8
from remora.kernels.moe import moe
from remora.kernels.moe_routing import route
from remora.kernels.moe_rules import Gating, Routing
from remora.kernels.moe_weights import ExpertWeight, StackableWeight
from remora.kernels.quantised.quant_formats import (
    BLOCK,
    Fp4GroupWeight,
    Fp8BlockWeight,
    Int4Weight,
    Int8GroupWeight,
)
from tests.kernels.gpu.devices import empty

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
GROUPS = {"int4 32": 32, "int4 128": 128, "int8 32": 32, "int8 128": 128, "mxfp4": 32, "nvfp4": 16}
FP4 = {"mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}
V3 = Routing(top_k=8, is_sigmoid=True, scaling=2.5, num_groups=8, top_groups=4, group_best=2)


def weight(outputs: int, inputs: int, dtype: torch.dtype) -> ExpertWeight:
    values = empty(EXPERTS, outputs, inputs, dtype=dtype)
    if dtype != torch.float8_e4m3fn:
        return values
    return Fp8BlockWeight(values=values, scales=empty(EXPERTS, outputs // BLOCK, inputs // BLOCK))


def layer(tokens: int, dtype: torch.dtype, **options: Any) -> None:
    is_fp8 = dtype == torch.float8_e4m3fn
    if is_fp8 and not has_fp8(torch.device("meta")):
        return
    weights = weight(2 * INNER, HIDDEN, dtype), weight(HIDDEN, INNER, dtype)
    launch(tokens, torch.bfloat16 if is_fp8 else dtype, weights, HIDDEN, **options)


def grouped(name: str, tokens: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    """Launch a layer in groups; MXFP4's has the sizes of gpt-oss, whose last run is half empty."""
    hidden, inner = (2880, 2880) if name == "mxfp4" else (HIDDEN, INNER)
    weights = stack(name, 2 * inner, hidden), stack(name, hidden, inner)
    launch(tokens, dtype, weights, hidden, **options)


def launch(
    tokens: int,
    dtype: torch.dtype,
    weights: tuple[ExpertWeight, ExpertWeight],
    hidden: int,
    **options: Any,
) -> None:
    ids = empty(tokens, TOP_K, dtype=torch.int32)
    moe(empty(tokens, hidden, dtype=dtype), ids, empty(tokens, TOP_K), *weights, **options)


def stack(name: str, outputs: int, inputs: int) -> StackableWeight:
    format, size = name.split(" ")[0], GROUPS[name]
    values = empty(EXPERTS, outputs, -(-inputs // 128) * 64, dtype=torch.uint8)
    shape = EXPERTS, inputs // size, outputs
    if format in FP4:
        return Fp4GroupWeight(
            values=values,
            scales=empty(*shape, dtype=FP4[format]),
            factors=empty(EXPERTS, outputs) if format == "nvfp4" else None,
            inputs=inputs,
            group_size=size,
        )
    scales, zeros = empty(*shape, dtype=torch.float16), empty(*shape, dtype=torch.uint8)
    if format == "int8":
        values = empty(EXPERTS, outputs, inputs, dtype=torch.uint8)
        return Int8GroupWeight(values=values, scales=scales, zeros=zeros, group_size=size)
    return Int4Weight(values=values, scales=scales, zeros=zeros, inputs=inputs, group_size=size)


def biases(hidden: int, inner: int) -> Any:
    return tuple(empty(EXPERTS, size, dtype=torch.bfloat16) for size in (2 * inner, hidden))


CLAMPED = Gating(sharpness=1.702, offset=1.0, limit=7.0)
ROWS = (8, 400, 4096)
LAUNCHES = {
    "routing of Qwen3": partial(
        route, empty(8, EXPERTS, dtype=torch.bfloat16), Routing(top_k=TOP_K), None
    ),
    "routing of padded Qwen3": partial(
        route,
        empty(8, EXPERTS, dtype=torch.bfloat16),
        Routing(top_k=TOP_K),
        None,
        empty(8, dtype=torch.int64),
    ),
    "routing of DeepSeek-V3": partial(route, empty(8, 256, dtype=torch.bfloat16), V3, empty(256)),
    "bfloat16, 8 tokens": partial(layer, 8, torch.bfloat16),
    "bfloat16, 400 tokens": partial(layer, 400, torch.bfloat16),
    "bfloat16, 800 tokens": partial(layer, 800, torch.bfloat16),
    "bfloat16, 4096 tokens": partial(layer, 4096, torch.bfloat16),
    "bfloat16 with biases and limits, 8 tokens": partial(
        layer,
        8,
        torch.bfloat16,
        biases=biases(HIDDEN, INNER),
        gating=CLAMPED,
    ),
    "fp8, 8 tokens": partial(layer, 8, torch.float8_e4m3fn),
    "fp8, 400 tokens": partial(layer, 400, torch.float8_e4m3fn),
    "fp8, 4096 tokens": partial(layer, 4096, torch.float8_e4m3fn),
    "float32, 8 tokens": partial(layer, 8, torch.float32),
    **{f"int4 128, {tokens} tokens": partial(grouped, "int4 128", tokens) for tokens in ROWS},
    "int8 128, 8 tokens": partial(grouped, "int8 128", 8),
    "nvfp4, 400 tokens": partial(grouped, "nvfp4", 400),
    "mxfp4 with biases and limits, 4096 tokens": partial(
        grouped, "mxfp4", 4096, biases=biases(2880, 2880), gating=CLAMPED
    ),
    "int8 32, 4096 tokens": partial(grouped, "int8 32", 4096),
    "mxfp4 and float16, 4096 tokens": partial(grouped, "mxfp4", 4096, torch.float16),
    "mxfp4 and float32, 8 tokens": partial(grouped, "mxfp4", 8, torch.float32),
}
