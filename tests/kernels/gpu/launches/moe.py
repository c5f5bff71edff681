"""Launches of layers of experts, as Qwen3-30B-A3B and DeepSeek-V3 make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remora.kernels.gpu.arch import has_fp8
from remora.kernels.moe import moe
from remora.kernels.moe_routing import route
from remora.kernels.moe_rules import Gating, Routing
from remora.kernels.moe_weights import ExpertWeight
from remora.kernels.quant_formats import BLOCK, Fp8BlockWeight

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
V3 = Routing(top_k=8, is_sigmoid=True, scaling=2.5, num_groups=8, top_groups=4, group_best=2)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(outputs: int, inputs: int, dtype: torch.dtype) -> ExpertWeight:
    values = empty(EXPERTS, outputs, inputs, dtype=dtype)
    if dtype != torch.float8_e4m3fn:
        return values
    return Fp8BlockWeight(values=values, scales=empty(EXPERTS, outputs // BLOCK, inputs // BLOCK))


def layer(tokens: int, dtype: torch.dtype, **options: Any) -> Callable[[], object]:
    def launch() -> None:
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

    return launch


def routing(of_model: Routing, experts: int, *, has_bias: bool) -> Callable[[], object]:
    logits = empty(8, experts, dtype=torch.bfloat16)
    return lambda: route(logits, of_model, empty(experts) if has_bias else None)


LAUNCHES: dict[str, Callable[[], object]] = {
    "routing of Qwen3": routing(Routing(top_k=TOP_K), EXPERTS, has_bias=False),
    "routing of DeepSeek-V3": routing(V3, 256, has_bias=True),
    "bfloat16, 8 tokens": layer(8, torch.bfloat16),
    "bfloat16, 400 tokens": layer(400, torch.bfloat16),
    "bfloat16, 4096 tokens": layer(4096, torch.bfloat16),
    "bfloat16 with biases and limits, 8 tokens": layer(
        8,
        torch.bfloat16,
        biases=(
            empty(EXPERTS, 2 * INNER, dtype=torch.bfloat16),
            empty(EXPERTS, HIDDEN, dtype=torch.bfloat16),
        ),
        gating=Gating(sharpness=1.702, offset=1.0, limit=7.0),
    ),
    "fp8, 8 tokens": layer(8, torch.float8_e4m3fn),
    "fp8, 4096 tokens": layer(4096, torch.float8_e4m3fn),
    "float32, 8 tokens": layer(8, torch.float32),
}
