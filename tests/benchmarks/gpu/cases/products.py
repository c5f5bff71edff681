"""Products with weights: torch's own, quantised and batch-invariant ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.models.config import ExpertsConfig
from remora.kernels.linear_invariant import linear_invariant
from remora.kernels.moe import moe, moe_reference
from remora.kernels.moe_routing import route, route_reference
from remora.kernels.moe_rules import Routing
from remora.kernels.quantised.linear_quant import linear_quant, linear_quant_reference
from remora.kernels.quantised.quant_formats import BLOCK, Fp8BlockWeight, Fp8Weight
from tests.benchmarks.gpu.timing import Call, KernelCase, Pairs
from tests.kernels.quantised_weights import MAKERS, random_fp8, random_scales

ROWS, TINY_ROWS = (1, 8, 64, 256, 4096), (3,)
COMPARED_ROWS = 512  # at once
BYTES = {
    "int8": 1.0,
    "int8 32": 1.0 + 3 / 32,
    "fp8": 1.0,
    "fp8 blocks": 1.0,
    "int4 128": 0.5 + 3 / 128,
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}


def plain_cases(model: str, config: dict[str, Any], *, tiny: bool) -> Iterator[KernelCase]:
    """Yield products of a dense model's layer with weights of 16 bits."""
    for name, outputs, inputs in layers(config, tiny=tiny):
        for rows in TINY_ROWS if tiny else ROWS:
            yield product(model, "torch", name, rows, outputs, inputs)
            yield product(model, "linear_invariant", name, rows, outputs, inputs)


def quantised_cases(model: str, config: dict[str, Any], *, tiny: bool) -> Iterator[KernelCase]:
    """Yield the same with weights in as many formats as there are."""
    for name, outputs, inputs in layers(config, tiny=tiny):
        for rows in TINY_ROWS if tiny else ROWS:
            for kind in BYTES:
                yield product(model, f"linear_quant {kind}", name, rows, outputs, inputs)


def layers(config: dict[str, Any], *, tiny: bool) -> list[tuple[str, int, int]]:
    """Return names, outputs and inputs of a layer's products."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    few = [("qkv", heads * config["head_dim"], hidden)]
    return few if tiny else [*few, ("gate_up", 2 * inner, hidden), ("down", hidden, inner)]


def product(model: str, kernel: str, name: str, rows: int, outputs: int, inputs: int) -> KernelCase:
    kind = kernel.removeprefix("linear_quant ")

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        x = torch.randn(rows, inputs, device=device).to(dtype)
        if kind in MAKERS:
            quantised = MAKERS[kind](outputs, inputs, device.type)
            return Call(
                lambda: linear_quant(x, quantised),
                expected=lambda result: by_rows(x, result, quantised, linear_quant_reference),
                peers=scaled_mm(x, quantised),
            )
        weight = torch.empty(outputs, inputs, dtype=dtype, device=device).normal_(std=0.02)
        if kernel == "torch":
            return Call(lambda: F.linear(x, weight))
        return Call(
            lambda: linear_invariant(x, weight),
            expected=lambda result: by_rows(x, result, weight.float(), F.linear),
            peers={"cublas": lambda: F.linear(x, weight)},
        )

    return KernelCase(
        model=model,
        kernel=kernel,
        shape=f"{name} {rows} rows",
        num_bytes=BYTES.get(kind, 2.0) * outputs * inputs + 2.0 * rows * (outputs + inputs),
        flops=2.0 * rows * outputs * inputs,
        make=make,
        peers={"linear_invariant": ("cublas",), "linear_quant fp8": ("scaled_mm",)}.get(kernel, ()),
    )


def by_rows(
    x: Tensor, result: Tensor, weight: Any, multiply: Callable[[Tensor, Any], Tensor]
) -> Pairs:
    """Compare a product in float32, some rows at a time."""
    for own in (slice(at, at + COMPARED_ROWS) for at in range(0, len(x), COMPARED_ROWS)):
        yield result[own], multiply(x[own].float(), weight)


def scaled_mm(x: Tensor, weight: object) -> dict[str, Callable[[], object]]:
    """Return torch's product of the same weights with rows that are quantised beforehand."""
    if not isinstance(weight, Fp8Weight) or x.device.type != "cuda":
        return {}
    values = x.to(torch.float8_e4m3fn)
    of_rows = torch.ones(len(x), 1, device=x.device)
    of_columns = weight.scales[None]
    return {
        "scaled_mm": lambda: torch._scaled_mm(
            values, weight.values.T, of_rows, of_columns, out_dtype=torch.bfloat16
        )
    }


def expert_cases(model: str, config: dict[str, Any], *, tiny: bool) -> Iterator[KernelCase]:
    """Yield the layers of experts."""
    for rows in TINY_ROWS if tiny else ROWS:
        yield routing(model, config, rows)
        yield experts(model, config, rows)


def fp8_expert_cases(model: str, config: dict[str, Any]) -> Iterator[KernelCase]:
    """Yield the same with weights in blocks of float8."""
    for rows in ROWS:
        yield experts(model, config, rows, is_fp8=True)


def routing(model: str, config: dict[str, Any], rows: int) -> KernelCase:
    num_experts, top_k = config["num_experts"], config["num_experts_per_tok"]

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        logits = torch.randn(rows, num_experts, device=device).to(dtype)
        routing = Routing(top_k=top_k)
        return Call(
            lambda: route(logits, routing),
            result=lambda: route(logits, routing)[0],
            expected=lambda result: iter([(result, route_reference(logits, routing)[0])]),
        )

    return KernelCase(
        model=model,
        kernel="route",
        shape=f"{rows} rows",
        num_bytes=rows * (2.0 * num_experts + 8 * top_k),
        make=make,
    )


def experts(model: str, config: dict[str, Any], rows: int, *, is_fp8: bool = False) -> KernelCase:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    num_experts, top_k = config["num_experts"], config["num_experts_per_tok"]
    chosen = ExpertsConfig(num_experts=num_experts, size=inner, routing=Routing(top_k=top_k))
    used = chosen.experts_read(rows)

    def make(device: torch.device, dtype: torch.dtype) -> Call:
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

        def expected(result: Tensor) -> Pairs:
            for own in (slice(at, at + COMPARED_ROWS) for at in range(0, rows, COMPARED_ROWS)):
                yield result[own], moe_reference(x[own], ids[own], weights[own], gate_up, down)

        return Call(
            lambda: moe(x, ids, weights, gate_up, down),
            expected=expected,
            peers={} if is_fp8 else grouped_mm(x, ids, gate_up, down),
        )

    of_weight = 1.0 if is_fp8 else 2.0
    return KernelCase(
        model=model,
        kernel="moe fp8 blocks" if is_fp8 else "moe",
        shape=f"{rows} rows",
        num_bytes=of_weight * used * 3 * inner * hidden + 2.0 * 2 * rows * hidden,
        flops=2.0 * rows * top_k * 3 * inner * hidden,
        make=make,
        peers=() if is_fp8 else ("grouped_mm",),
    )


def grouped_mm(x: Tensor, ids: Tensor, gate_up: Any, down: Any) -> dict[str, Callable[[], object]]:
    """Return torch's two grouped products of rows that are sorted beforehand, with the gate."""
    if x.device.type != "cuda":
        return {}
    order = ids.flatten().argsort()
    rows = x[order // ids.shape[1]]
    counts = torch.bincount(ids.flatten(), minlength=len(gate_up))
    ends = counts.cumsum(0).to(torch.int32)

    def run() -> object:
        wide = torch._grouped_mm(rows, gate_up.transpose(1, 2), ends)
        gate, up = wide.chunk(2, dim=1)
        return torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), ends)

    return {"grouped_mm": run}
