"""Random quantised weights, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from remora.kernels.quantised.int4 import pack_int4
from remora.kernels.quantised.quant_formats import (
    BLOCK,
    MAX_HALF,
    Fp4GroupWeight,
    Fp8BlockWeight,
    Fp8Weight,
    Int8GroupWeight,
    Int8Weight,
    QuantisedWeight,
    in_runs,
)


def random_fp8(*shape: int, device: str) -> torch.Tensor:
    """Return numbers of all sizes that the format has, down to those below its normal ones."""
    sizes = torch.exp2(torch.randint(-9, 6, shape, device=device))
    return (torch.randn(shape, device=device) * sizes).to(torch.float8_e4m3fn)


def random_scales(*shape: int, device: str) -> torch.Tensor:
    return torch.rand(shape, device=device) + 0.5


def int8(outputs: int, inputs: int, device: str) -> Int8Weight:
    values = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device)
    return Int8Weight(values=values, scales=random_scales(outputs, device=device))


def fp8(outputs: int, inputs: int, device: str) -> Fp8Weight:
    return Fp8Weight(
        values=random_fp8(outputs, inputs, device=device),
        scales=random_scales(outputs, device=device),
    )


def fp8_per_tensor(outputs: int, inputs: int, device: str) -> Fp8Weight:
    return Fp8Weight(
        values=random_fp8(outputs, inputs, device=device),
        scales=torch.full((outputs,), 0.7, device=device),
        input_scale=torch.full((1,), 0.005, device=device),
    )


def fp8_blocks(outputs: int, inputs: int, device: str) -> Fp8BlockWeight:
    blocks = -(-outputs // BLOCK), -(-inputs // BLOCK)
    return Fp8BlockWeight(
        values=random_fp8(outputs, inputs, device=device),
        scales=random_scales(*blocks, device=device),
    )


def int4(group_size: int) -> Callable[[int, int, str], QuantisedWeight]:
    def make(outputs: int, inputs: int, device: str) -> QuantisedWeight:
        groups = -(-inputs // group_size)
        return pack_int4(
            torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=device),
            random_scales(groups, outputs, device=device).half(),
            torch.randint(0, 17, (groups, outputs), device=device),
            group_size=group_size,
        )

    return make


def int8_groups(outputs: int, inputs: int, device: str) -> QuantisedWeight:
    groups = -(-inputs // 32)
    return Int8GroupWeight(
        values=torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, device=device),
        scales=random_scales(groups, outputs, device=device).half(),
        zeros=torch.randint(0, 256, (groups, outputs), dtype=torch.uint8, device=device),
        group_size=32,
    )


def fp4(group_size: int) -> Callable[[int, int, str], QuantisedWeight]:
    """Make MXFP4 or NVFP4 with all exponents and scales that products of float32 can hold."""

    def make(outputs: int, inputs: int, device: str) -> QuantisedWeight:
        groups = -(-inputs // group_size)
        if group_size == 32:
            codes = torch.randint(107, 134, (groups, outputs), dtype=torch.uint8, device=device)
            scales = codes.view(torch.float8_e8m0fnu)
        else:
            scales = random_fp8(groups, outputs, device=device)
        is_nv = group_size == 16
        return Fp4GroupWeight(
            values=in_runs(
                torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=device), MAX_HALF
            ),
            scales=scales,
            factors=random_scales(outputs, device=device) if is_nv else None,
            inputs=inputs,
            group_size=group_size,
        )

    return make


MAKERS: dict[str, Callable[[int, int, str], QuantisedWeight]] = {
    "int8": int8,
    "int8 32": int8_groups,
    "fp8": fp8,
    "fp8 per tensor": fp8_per_tensor,
    "fp8 blocks": fp8_blocks,
    "int4 32": int4(32),
    "int4 64": int4(64),
    "int4 128": int4(128),
    "int4 256": int4(256),
    "mxfp4": fp4(32),
    "nvfp4": fp4(16),
}
