"""Products with weights: torch's own, quantised and batch-invariant ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from remora.engine.models.config import ExpertsConfig
from remora.kernels.linear_invariant import linear_invariant
from remora.kernels.linear_quant import linear_quant
from remora.kernels.moe import moe
from remora.kernels.moe_routing import route
from remora.kernels.moe_rules import Routing
from remora.kernels.quant_formats import BLOCK, Fp8BlockWeight
from tests.benchmarks.gpu.timing import Case
from tests.kernels.quantised_weights import MAKERS, random_fp8, random_scales

ROWS, TINY_ROWS = (1, 8, 64, 256, 4096), (3,)
BYTES = {"int8": 1.0, "fp8": 1.0, "fp8 blocks": 1.0, "int4 128": 0.5 + 3 / 128}


def cases(model: str, config: dict[str, Any], *, tiny: bool) -> Iterator[Case]:
    """Yield products of a dense model's layer, in as many formats as there are."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    layers = {"qkv": (heads * config["head_dim"], hidden)}
    if not tiny:
        layers |= {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    for name, (outputs, inputs) in layers.items():
        for rows in TINY_ROWS if tiny else ROWS:
            yield product(model, "torch", name, rows, outputs, inputs)
            yield product(model, "linear_invariant", name, rows, outputs, inputs)
            for kind in BYTES:
                yield product(model, f"linear_quant {kind}", name, rows, outputs, inputs)


def product(model: str, kernel: str, name: str, rows: int, outputs: int, inputs: int) -> Case:
    kind = kernel.removeprefix("linear_quant ")

    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
        x = torch.randn(rows, inputs, device=device).to(dtype)
        if kind in MAKERS:
            quantised = MAKERS[kind](outputs, inputs, device.type)
            return lambda: linear_quant(x, quantised)
        weight = torch.empty(outputs, inputs, dtype=dtype, device=device).normal_(std=0.02)
        if kernel == "torch":
            return lambda: F.linear(x, weight)
        return lambda: linear_invariant(x, weight)

    return Case(
        model=model,
        kernel=kernel,
        shape=f"{name} {rows} rows",
        num_bytes=BYTES.get(kind, 2.0) * outputs * inputs + 2.0 * rows * (outputs + inputs),
        flops=2.0 * rows * outputs * inputs,
        make=make,
    )


def expert_cases(model: str, config: dict[str, Any], *, tiny: bool) -> Iterator[Case]:
    """Yield the layers of experts."""
    for rows in TINY_ROWS if tiny else ROWS:
        yield routing(model, config, rows)
        yield experts(model, config, rows)
        if not tiny:
            yield experts(model, config, rows, is_fp8=True)


def routing(model: str, config: dict[str, Any], rows: int) -> Case:
    num_experts, top_k = config["num_experts"], config["num_experts_per_tok"]

    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
        logits = torch.randn(rows, num_experts, device=device).to(dtype)
        return lambda: route(logits, Routing(top_k=top_k))

    return Case(
        model=model,
        kernel="route",
        shape=f"{rows} rows",
        num_bytes=rows * (2.0 * num_experts + 8 * top_k),
        make=make,
    )


def experts(model: str, config: dict[str, Any], rows: int, *, is_fp8: bool = False) -> Case:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    num_experts, top_k = config["num_experts"], config["num_experts_per_tok"]
    chosen = ExpertsConfig(num_experts=num_experts, size=inner, routing=Routing(top_k=top_k))
    used = chosen.experts_read(rows)

    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
        def weight(outputs: int, inputs: int) -> torch.Tensor | Fp8BlockWeight:
            shape = num_experts, outputs, inputs
            if not is_fp8:
                return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02)
            blocks = num_experts, -(-outputs // BLOCK), -(-inputs // BLOCK)
            values = random_fp8(*shape, device=device.type)
            return Fp8BlockWeight(
                values=values, scales=random_scales(*blocks, device=device.type) / 100
            )

        x = torch.randn(rows, hidden, device=device).to(dtype)
        ids = torch.rand(rows, num_experts, device=device).argsort(dim=1)[:, :top_k].int()
        ids = ids.contiguous()
        weights = torch.rand(rows, top_k, device=device)
        gate_up, down = weight(2 * inner, hidden), weight(hidden, inner)
        return lambda: moe(x, ids, weights, gate_up, down)

    of_weight = 1.0 if is_fp8 else 2.0
    return Case(
        model=model,
        kernel="moe fp8 blocks" if is_fp8 else "moe",
        shape=f"{rows} rows",
        num_bytes=of_weight * used * 3 * inner * hidden + 2.0 * 2 * rows * hidden,
        flops=2.0 * rows * top_k * 3 * inner * hidden,
        make=make,
    )
