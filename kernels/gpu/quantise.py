"""Triton kernels of `kernels/quantised/quantise.py`, with the same bits.

One program per row, held in registers if it fits, or per some groups of a row. float8 is computed
with integer arithmetic, so that GPUs without its instructions support it and the interpreter rounds
like a GPU.

Legend, and suffixes of blocks: T rows, I inputs, G groups of a row; K inputs of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.quantised.quant_formats import GROUP, MAX_FP8, MAX_INT8, MIN_AMAX

MAX_BLOCK = 16384  # inputs a program holds: 64 in each thread of 8 warps
GROUPS = 8  # of a program


def quantise_rows(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Do what `quantise_int8` and `quantise_fp8` do."""
    rows, inputs = x.shape
    assert x.stride(1) == 1
    values = torch.empty((rows, inputs), dtype=torch.int8, device=x.device)
    scales = scale
    if scales is None:
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(MAX_BLOCK, triton.next_power_of_2(inputs))
    if rows > 0:
        quantise_rows_kernel[(rows,)](
            x,
            values,
            scales,
            inputs,
            x.stride(0),
            IS_FP8=dtype != torch.int8,
            IS_SCALED=scale is not None,
            LARGEST=MAX_INT8 if dtype == torch.int8 else MAX_FP8,
            MIN_AMAX=MIN_AMAX,
            IS_WHOLE=inputs <= block,
            K=block,
            num_warps=max(1, min(8, block // 512)),
            num_stages=1,
            enable_fp_fusion=False,
        )
    return values.view(dtype), scales


def quantise_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `quantise_fp8_groups` does."""
    rows, inputs = x.shape
    assert x.stride(1) == 1
    groups = triton.cdiv(inputs, GROUP)
    values = torch.empty((rows, inputs), dtype=torch.int8, device=x.device)
    scales = torch.empty((groups, rows), dtype=torch.float32, device=x.device)
    if rows > 0:
        quantise_groups_kernel[(rows, triton.cdiv(groups, GROUPS))](
            x,
            values,
            scales,
            rows,
            inputs,
            groups,
            x.stride(0),
            LARGEST=MAX_FP8,
            MIN_AMAX=MIN_AMAX,
            G=GROUPS,
            K=GROUP,
            num_warps=2,
            num_stages=1,
            enable_fp_fusion=False,
        )
    return values.view(torch.float8_e4m3fn), scales


@triton.jit
def quantise_rows_kernel(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    inputs: int,
    x_stride: int,
    IS_FP8: tl.constexpr,
    IS_SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    values += row * inputs
    input_K = tl.arange(0, K)
    x_K = tl.load(x + input_K, mask=input_K < inputs, other=0.0).to(tl.float32)
    if IS_SCALED:
        scale = tl.load(scales)
    else:
        most_K = tl.abs(x_K)
        if not IS_WHOLE:
            for block in range(K, inputs, K):
                at_K = block + input_K
                next_K = tl.load(x + at_K, mask=at_K < inputs, other=0.0).to(tl.float32)
                most_K = tl.maximum(most_K, tl.abs(next_K))
        scale = tl.div_rn(tl.maximum(tl.max(most_K, axis=0), MIN_AMAX), LARGEST)
        tl.store(scales + row, scale)
    value_K = rounded(tl.div_rn(x_K, scale), LARGEST, IS_FP8)
    tl.store(values + input_K, value_K, mask=input_K < inputs)
    if not IS_WHOLE:
        for block in range(K, inputs, K):
            at_K = block + input_K
            next_K = tl.load(x + at_K, mask=at_K < inputs, other=0.0).to(tl.float32)
            value_K = rounded(tl.div_rn(next_K, scale), LARGEST, IS_FP8)
            tl.store(values + at_K, value_K, mask=at_K < inputs)


@triton.jit(do_not_specialize=["rows"])
def quantise_groups_kernel(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    rows: int,
    inputs: int,
    groups: int,
    x_stride: int,
    LARGEST: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Program (row, some groups)."""
    row = tl.program_id(0).to(tl.int64)
    group_G = tl.program_id(1) * G + tl.arange(0, G)
    input_GK = group_G[:, None] * K + tl.arange(0, K)[None, :]
    is_input_GK = input_GK < inputs
    x_GK = tl.load(x + row * x_stride + input_GK, mask=is_input_GK, other=0.0).to(tl.float32)
    scale_G = tl.div_rn(tl.maximum(tl.max(tl.abs(x_GK), axis=1), MIN_AMAX), LARGEST)
    tl.store(scales + group_G.to(tl.int64) * rows + row, scale_G, mask=group_G < groups)
    value_GK = rounded(tl.div_rn(x_GK, scale_G[:, None]), LARGEST, True)
    tl.store(values + row * inputs + input_GK, value_GK, mask=is_input_GK)


@triton.jit
def rounded(y: tl.tensor, LARGEST: tl.constexpr, IS_FP8: tl.constexpr) -> tl.tensor:
    """Round float32 to int8, or to the bits of float8_e4m3fn; ties to even."""
    y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
    if IS_FP8:
        bits = y.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Drop 20 of 23 fraction bits and change the exponent's bias from 127 to 7. Values below
        # 2**-6 are multiples of 2**-9, the spacing of float32 at 2**14.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(size < (127 - 6) << 23, small, normal) | ((bits >> 24) & 0x80)
        return code.to(tl.int8)
    # Adding and subtracting 1.5 * 2**23 rounds to whole numbers.
    return ((y + 12582912.0) - 12582912.0).to(tl.int8)
