"""Launches of layers of experts, as Qwen3-30B-A3B and DeepSeek-V3 make them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from remora.kernels.gpu.arch import has_fp8
from remora.kernels.moe import moe
from remora.kernels.moe_routing import route
from remora.kernels.moe_rules import Gating, Routing
from remora.kernels.moe_weights import ExpertWeight
from remora.kernels.quantised.quant_formats import BLOCK, Fp8BlockWeight
from tests.kernels.gpu.devices import empty

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
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
    moe(
        empty(tokens, HIDDEN, dtype=torch.bfloat16 if is_fp8 else dtype),
        empty(tokens, TOP_K, dtype=torch.int32),
        empty(tokens, TOP_K),
        weight(2 * INNER, HIDDEN, dtype),
        weight(HIDDEN, INNER, dtype),
        **options,
    )


BIASES = tuple(empty(EXPERTS, size, dtype=torch.bfloat16) for size in (2 * INNER, HIDDEN))
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
        biases=BIASES,
        gating=Gating(sharpness=1.702, offset=1.0, limit=7.0),
    ),
    "fp8, 8 tokens": partial(layer, 8, torch.float8_e4m3fn),
    "fp8, 400 tokens": partial(layer, 400, torch.float8_e4m3fn),
    "fp8, 4096 tokens": partial(layer, 4096, torch.float8_e4m3fn),
    "float32, 8 tokens": partial(layer, 8, torch.float32),
}
