"""Triton kernel of `linear_quant` for int4 weights.

Weights are read as bytes and widened in registers: the low halves of a block of bytes are a block
of consecutive inputs, the high halves the next. A 4-bit number or-ed into the last fraction bits of
a constant yields the constant plus the number in one instruction; subtracting the zero point is
exact, so scales are applied to a group's sum in float32.

Legend, and suffixes of blocks: as in `products.py`; H inputs of half a run (`Int4Weight`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.arch import Arch, arch_of
from remora.kernels.gpu.products import (
    MANY_ROWS,
    Grid,
    TileLaunch,
    launch_for,
    load_rows,
    run_product,
    scaled,
    store_tile,
    table,
    tile_of,
)
from remora.kernels.quantised.quant_formats import MAX_HALF, Int4Weight

# A block of inputs is a run of at most 128. 4-bit weights are small, so there are more stages.
LAUNCHES = table(
    TileLaunch(rows=16, columns=64, inputs=2 * MAX_HALF, num_warps=4, num_stages=6),
    TileLaunch(rows=32, columns=64, inputs=2 * MAX_HALF, num_warps=4, num_stages=5),
    TileLaunch(rows=64, columns=64, inputs=2 * MAX_HALF, num_warps=4, num_stages=4),
    TileLaunch(rows=MANY_ROWS, columns=128, inputs=2 * MAX_HALF, num_warps=8, num_stages=3),
    but={
        Arch.CDNA: (
            TileLaunch(rows=64, columns=128, inputs=2 * MAX_HALF, num_warps=8, num_stages=2),
            TileLaunch(rows=MANY_ROWS, columns=64, inputs=2 * MAX_HALF, num_warps=8, num_stages=2),
        ),
    },
)
WIDE_LAUNCH = TileLaunch(rows=16, columns=32, inputs=2 * MAX_HALF, num_warps=4, num_stages=2)
# The number of each format whose last fraction bit counts as 1: its bits and its value.
MAGIC = {
    torch.bfloat16: (0x4300, 128.0),
    torch.float16: (0x6400, 1024.0),
    torch.float32: (0x4B000000, 8388608.0),
}


def multiply(x: Tensor, weight: Int4Weight, bias: Tensor | None, y: Tensor) -> None:
    """Compute `linear_quant` with an int4 weight into `y`."""
    rows, inputs = x.shape
    assert x.stride(1) == 1
    launch = WIDE_LAUNCH if x.itemsize == 4 else launch_for(LAUNCHES, arch_of(x.device), rows)
    bits, value = MAGIC[x.dtype]
    run_product(
        int4_kernel,
        launch,
        Grid.of(launch, rows, len(weight.values), inputs),
        x,
        (weight.values, weight.scales, weight.zeros),
        bias,
        y,
        strides=(x.stride(0), weight.values.shape[1], len(weight.scales)),
        weight_bytes=0.5,
        H=weight.half,
        GROUP_SIZE=weight.group_size,
        MAGIC_BITS=bits,
        MAGIC=value,
        IS_EVEN=inputs % (2 * weight.half) == 0,
    )


@triton.jit(do_not_specialize=["rows"])
def int4_kernel(
    x: tl.tensor,
    w: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor | None,
    y: tl.tensor,
    rows: int,
    columns: int,
    inputs: int,
    x_stride: int,
    w_stride: int,
    groups: int,
    split_len: int,
    R: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    MAGIC_BITS: tl.constexpr,
    MAGIC: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> None:
    """Program (tile, split); a step is a run, whose halves belong to one group or two."""
    from_row, from_column = tile_of(tl.program_id(0), rows, columns, R, C, GROUP)
    row_R = tl.minimum(from_row + tl.arange(0, R), rows - 1).to(tl.int64)
    column_C = tl.minimum(from_column + tl.arange(0, C), columns - 1)
    x_R, w_C = x + row_R * x_stride, w + column_C.to(tl.int64) * w_stride
    begin = tl.program_id(1) * split_len
    IS_WIDE: tl.constexpr = x.dtype.element_ty == tl.float32
    sum_CR = tl.zeros([C, R], tl.float32)
    for run in range(begin, tl.minimum(begin + split_len, inputs), 2 * H):
        low_H = run + tl.arange(0, H)
        high_H = low_H + H
        bytes_CH = tl.load(w_C[:, None] + (run // 2 + tl.arange(0, H))[None, :])
        low_HR = load_rows(x_R, low_H, inputs, IS_EVEN)
        high_HR = load_rows(x_R, high_H, inputs, IS_EVEN)
        at_C = (run // GROUP_SIZE) * columns + column_C
        low_zero_C = tl.load(zeros + at_C)
        high_zero_C = low_zero_C
        if GROUP_SIZE == H:
            next_C = tl.minimum(run // GROUP_SIZE + 1, groups - 1) * columns + column_C
            high_zero_C = tl.load(zeros + next_C)
        low_CH = widened(bytes_CH & 15, low_zero_C, MAGIC_BITS, MAGIC, IS_WIDE, x.dtype.element_ty)
        high_CH = widened(
            bytes_CH >> 4, high_zero_C, MAGIC_BITS, MAGIC, IS_WIDE, x.dtype.element_ty
        )
        low_sum_CR = tl.dot(low_CH, low_HR, input_precision="ieee")
        scale_C = tl.load(scales + at_C).to(tl.float32)
        if GROUP_SIZE == H:
            sum_CR += low_sum_CR * scale_C[:, None]
            next_scale_C = tl.load(scales + next_C).to(tl.float32)
            high_sum_CR = tl.dot(high_CH, high_HR, input_precision="ieee")
            sum_CR += high_sum_CR * next_scale_C[:, None]
        else:
            both_CR = tl.dot(high_CH, high_HR, low_sum_CR, input_precision="ieee")
            sum_CR += both_CR * scale_C[:, None]
    y_CR = scaled(sum_CR, None, None, bias, 0, from_row, from_column, rows, columns, R, C)
    store_tile(y, y_CR, from_row, from_column, tl.program_id(1), rows, columns, R, C)


@triton.jit
def widened(
    nibble_CH: tl.tensor,
    zero_C: tl.tensor,
    MAGIC_BITS: tl.constexpr,
    MAGIC: tl.constexpr,
    IS_WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Return 4-bit numbers minus their zero points, as floats."""
    if IS_WIDE:
        bits_CH = nibble_CH.to(tl.uint32) | MAGIC_BITS
    else:
        bits_CH = nibble_CH.to(tl.uint16) | MAGIC_BITS
    less_C = (zero_C.to(tl.float32) + MAGIC).to(DTYPE)
    return bits_CH.to(DTYPE, bitcast=True) - less_C[:, None]
