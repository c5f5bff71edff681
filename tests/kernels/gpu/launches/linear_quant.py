"""Launches of products with quantised weights, as an 8B model's layers make them."""

from __future__ import annotations

from functools import partial

import torch

from remora.kernels.quantised.linear_quant import linear_quant
from remora.kernels.quantised.quant_formats import (
    BLOCK,
    Fp4GroupWeight,
    Fp8BlockWeight,
    Fp8Weight,
    Int4Weight,
    Int8GroupWeight,
    Int8Weight,
    QuantisedWeight,
)
from remora.kernels.quantised.quantise import quantise_fp8, quantise_int8
from tests.kernels.gpu.devices import empty

INPUTS, OUTPUTS = 4096, 6144
DECODE, PREFILL = 8, 4096
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def fp4(size: int, dtype: torch.dtype) -> Fp4GroupWeight:
    return Fp4GroupWeight(
        values=empty(OUTPUTS, INPUTS // 2, dtype=torch.uint8),
        scales=empty(INPUTS // size, OUTPUTS, dtype=dtype),
        factors=None if size == 32 else empty(OUTPUTS),
        inputs=INPUTS,
        group_size=size,
    )


WEIGHTS: dict[str, QuantisedWeight] = {
    "int8": Int8Weight(values=empty(OUTPUTS, INPUTS, dtype=torch.int8), scales=empty(OUTPUTS)),
    **{
        f"int8 {size}": Int8GroupWeight(
            values=empty(OUTPUTS, INPUTS, dtype=torch.uint8),
            scales=empty(INPUTS // size, OUTPUTS, dtype=FP16),
            zeros=empty(INPUTS // size, OUTPUTS, dtype=torch.uint8),
            group_size=size,
        )
        for size in (32, 128)
    },
    "fp8": Fp8Weight(values=empty(OUTPUTS, INPUTS, dtype=FP8), scales=empty(OUTPUTS)),
    "blocks": Fp8BlockWeight(
        values=empty(OUTPUTS, INPUTS, dtype=FP8), scales=empty(OUTPUTS // BLOCK, INPUTS // BLOCK)
    ),
    **{
        f"int4 {size}": Int4Weight(
            values=empty(OUTPUTS, INPUTS // 2, dtype=torch.uint8),
            scales=empty(INPUTS // size, OUTPUTS, dtype=FP16),
            zeros=empty(INPUTS // size, OUTPUTS, dtype=torch.uint8),
            inputs=INPUTS,
            group_size=size,
        )
        for size in (32, 128)
    },
    "mxfp4": fp4(32, torch.float8_e8m0fnu),
    "nvfp4": fp4(16, FP8),
}


def launch(weight: str, rows: int, dtype: torch.dtype = BF16) -> None:
    linear_quant(empty(rows, INPUTS, dtype=dtype), WEIGHTS[weight])


LAUNCHES = {
    "int8 decode": partial(launch, "int8", DECODE),
    "int8 prefill": partial(launch, "int8", PREFILL),
    "int8 rows of many inputs": partial(quantise_int8, empty(1, 28672, dtype=FP16)),
    "int8 of groups, decode": partial(launch, "int8 128", DECODE),
    "int8 of groups, 64 rows": partial(launch, "int8 128", 64),
    "int8 of groups, prefill": partial(launch, "int8 128", PREFILL),
    "int8 of 32, prefill": partial(launch, "int8 32", PREFILL),
    "int8 of 32, float32": partial(launch, "int8 32", DECODE, FP32),
    "fp8 decode": partial(launch, "fp8", DECODE),
    "fp8 32 rows": partial(launch, "fp8", 32),
    "fp8 64 rows": partial(launch, "fp8", 64),
    "fp8 prefill": partial(launch, "fp8", PREFILL),
    "fp8 static": partial(quantise_fp8, empty(DECODE, INPUTS, dtype=BF16), empty(1)),
    "fp8 blocks decode": partial(launch, "blocks", DECODE),
    "fp8 blocks 32 rows": partial(launch, "blocks", 32),
    "fp8 blocks 64 rows": partial(launch, "blocks", 64),
    "fp8 blocks prefill": partial(launch, "blocks", PREFILL),
    "int4 decode": partial(launch, "int4 128", DECODE),
    "int4 32 rows": partial(launch, "int4 128", 32),
    "int4 64 rows": partial(launch, "int4 128", 64),
    "int4 prefill": partial(launch, "int4 128", PREFILL),
    "int4 of 32, prefill of float16": partial(launch, "int4 32", PREFILL, FP16),
    "int4 of 32, float32": partial(launch, "int4 32", DECODE, FP32),
    "mxfp4 decode": partial(launch, "mxfp4", DECODE),
    "mxfp4, prefill of float16": partial(launch, "mxfp4", PREFILL, FP16),
    "mxfp4, float32": partial(launch, "mxfp4", DECODE, FP32),
    "nvfp4 decode": partial(launch, "nvfp4", DECODE),
    "nvfp4 64 rows": partial(launch, "nvfp4", 64),
    "nvfp4 prefill": partial(launch, "nvfp4", PREFILL),
    "fp8 float32": partial(launch, "blocks", DECODE, FP32),
}
