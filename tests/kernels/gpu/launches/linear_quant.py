"""Launches of products with quantised weights, as an 8B model's layers make them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from remora.kernels.linear_quant import linear_quant
from remora.kernels.quant_formats import (
    BLOCK,
    Fp8BlockWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantisedWeight,
)
from remora.kernels.quantise import quantise_fp8, quantise_int8

INPUTS, OUTPUTS = 4096, 6144
DECODE, PREFILL = 8, 4096


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def int8() -> Int8Weight:
    return Int8Weight(values=empty(OUTPUTS, INPUTS, dtype=torch.int8), scales=empty(OUTPUTS))


def fp8() -> Fp8Weight:
    values = empty(OUTPUTS, INPUTS, dtype=torch.float8_e4m3fn)
    return Fp8Weight(values=values, scales=empty(OUTPUTS))


def blocks() -> Fp8BlockWeight:
    values = empty(OUTPUTS, INPUTS, dtype=torch.float8_e4m3fn)
    return Fp8BlockWeight(values=values, scales=empty(OUTPUTS // BLOCK, INPUTS // BLOCK))


def int4(group_size: int) -> Callable[[], QuantisedWeight]:
    groups = INPUTS // group_size
    return lambda: Int4Weight(
        values=empty(OUTPUTS, INPUTS // 2, dtype=torch.uint8),
        scales=empty(groups, OUTPUTS, dtype=torch.float16),
        zeros=empty(groups, OUTPUTS, dtype=torch.uint8),
        inputs=INPUTS,
        group_size=group_size,
    )


def case(
    make: Callable[[], QuantisedWeight], rows: int, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], object]:
    return lambda: linear_quant(empty(rows, INPUTS, dtype=dtype), make())


def static() -> object:
    return quantise_fp8(empty(DECODE, INPUTS, dtype=torch.bfloat16), empty(1))


LAUNCHES: dict[str, Callable[[], object]] = {
    "int8 decode": case(int8, DECODE),
    "int8 prefill": case(int8, PREFILL),
    "int8 rows of many inputs": lambda: quantise_int8(empty(1, 28672, dtype=torch.float16)),
    "fp8 decode": case(fp8, DECODE),
    "fp8 64 rows": case(fp8, 64),
    "fp8 prefill": case(fp8, PREFILL),
    "fp8 static": static,
    "fp8 blocks decode": case(blocks, DECODE),
    "fp8 blocks 64 rows": case(blocks, 64),
    "fp8 blocks prefill": case(blocks, PREFILL),
    "int4 decode": case(int4(128), DECODE),
    "int4 64 rows": case(int4(128), 64),
    "int4 prefill": case(int4(128), PREFILL),
    "int4 of 32, prefill of float16": case(int4(32), PREFILL, torch.float16),
    "int4 of 32, float32": case(int4(32), DECODE, torch.float32),
    "fp8 float32": case(blocks, DECODE, torch.float32),
}
