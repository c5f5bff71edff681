"""Triton kernels of `kernels/quantised/linear_quant.py` for int8 and float8 weights.

A separate launch quantises rows (`quantise.py`); then 8-bit tensor cores multiply them with the
stored weights. GPUs without float8_e4m3fn products widen the weight in registers and do not
quantise rows.

float8 sums are added to float32 after at most 128 inputs: Hopper's tensor cores keep fewer bits.

Legend, and suffixes of blocks: as in `products.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu import linear_groups
from remora.kernels.gpu.arch import Arch, arch_of, has_fp8
from remora.kernels.gpu.products import (
    MANY_ROWS,
    Grid,
    TileLaunch,
    launch_for,
    launch_of_widened,
    load_rows,
    load_weights,
    run_product,
    scaled,
    step_of,
    store_tile,
    table,
    tile_of,
)
from remora.kernels.gpu.quantise import quantise_groups, quantise_rows
from remora.kernels.quantised.quant_formats import (
    BLOCK,
    Fp8BlockWeight,
    Fp8Weight,
    GroupWeight,
    Int8Weight,
    QuantisedWeight,
)

# Decode is bound by reading weights: blocks of 16 KiB, with enough stages for 32 KiB or more in
# flight per multiprocessor. Prefill has the largest tiles that fit into registers.
LAUNCHES = table(
    TileLaunch(rows=16, columns=64, inputs=256, num_warps=4, num_stages=4),
    TileLaunch(rows=32, columns=64, inputs=256, num_warps=4, num_stages=4),
    TileLaunch(rows=64, columns=64, inputs=256, num_warps=4, num_stages=3),
    TileLaunch(rows=MANY_ROWS, columns=128, inputs=128, num_warps=8, num_stages=4),
    but={
        Arch.SMALL: (TileLaunch(rows=64, columns=64, inputs=128, num_warps=8, num_stages=4),),
    },
)
# A block of inputs shares a scale.
BLOCK_LAUNCHES = table(
    TileLaunch(rows=16, columns=64, inputs=BLOCK, num_warps=4, num_stages=6),
    TileLaunch(rows=32, columns=64, inputs=BLOCK, num_warps=4, num_stages=6),
    TileLaunch(rows=64, columns=64, inputs=BLOCK, num_warps=4, num_stages=5),
    TileLaunch(rows=MANY_ROWS, columns=128, inputs=BLOCK, num_warps=8, num_stages=4),
    but={
        Arch.BLACKWELL: (
            TileLaunch(rows=MANY_ROWS, columns=64, inputs=BLOCK, num_warps=8, num_stages=4),
        ),
    },
)


def multiply(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, y: Tensor) -> None:
    """Compute `linear_quant` into `y`."""
    if y.numel() == 0:
        return
    if isinstance(weight, GroupWeight):
        linear_groups.multiply(x, weight, bias, y)
    elif isinstance(weight, Int8Weight):
        values, scales = quantise_rows(x, torch.int8)
        multiply_scaled(values, scales, weight.values, weight.scales, bias, y)
    elif not has_fp8(x.device):
        multiply_widened(x, weight, bias, y)
    elif isinstance(weight, Fp8Weight):
        values, scales = quantise_rows(x, torch.float8_e4m3fn, weight.input_scale)
        multiply_scaled(values, scales, weight.values, weight.scales, bias, y)
    else:
        values, scales = quantise_groups(x)
        multiply_blocks(values, scales, weight, bias, y)


def multiply_scaled(
    x: Tensor, x_scales: Tensor, w: Tensor, w_scales: Tensor, bias: Tensor | None, y: Tensor
) -> None:
    """Multiply rows and a weight of 8 bits.

    x:         [rows, inputs] int8 or float8_e4m3fn
    x_scales:  [rows] or [1]
    w:         [columns, inputs], of the type of `x`
    w_scales:  [columns]
    y:         [rows, columns], overwritten
    """
    launch = launch_for(LAUNCHES, arch_of(x.device), len(x))
    run_product(
        scaled_kernel,
        launch,
        Grid.of(launch, len(x), *w.shape),
        x,
        (w,),
        bias,
        y,
        strides=(step_of(x_scales),),
        scales=(x_scales, w_scales),
        weight_bytes=1,
        K=launch.inputs,
        IS_EVEN=x.shape[1] % launch.inputs == 0,
    )


def multiply_blocks(
    x: Tensor, x_scales: Tensor, weight: Fp8BlockWeight, bias: Tensor | None, y: Tensor
) -> None:
    """Multiply float8 rows in groups of 128 with a weight in blocks.

    x:         [rows, inputs]
    x_scales:  [groups, rows]
    """
    launch = launch_for(BLOCK_LAUNCHES, arch_of(x.device), len(x))
    run_product(
        blocks_kernel,
        launch,
        Grid.of(launch, len(x), *weight.values.shape),
        x,
        (x_scales, weight.values, weight.scales),
        bias,
        y,
        weight_bytes=1,
        K=BLOCK,
        IS_EVEN=x.shape[1] % BLOCK == 0,
    )


def multiply_widened(
    x: Tensor, weight: Fp8Weight | Fp8BlockWeight, bias: Tensor | None, y: Tensor
) -> None:
    """Multiply rows with a float8 weight that is widened in registers."""
    assert x.stride(1) == 1
    arch = arch_of(x.device)
    launch = launch_of_widened(arch, len(x), x.itemsize)
    run_product(
        widened_kernel,
        launch,
        Grid.of(launch, len(x), *weight.values.shape),
        x,
        (weight.values.view(torch.uint8), weight.scales),
        bias,
        y,
        strides=(x.stride(0),),
        weight_bytes=1,
        K=launch.inputs,
        BLOCK=BLOCK,
        HAS_BLOCKS=isinstance(weight, Fp8BlockWeight),
        IS_EVEN=x.shape[1] % launch.inputs == 0,
    )


@triton.jit(do_not_specialize=["rows", "x_scale_step"])
def scaled_kernel(
    x: tl.tensor,
    w: tl.tensor,
    x_scales: tl.tensor | None,
    w_scales: tl.tensor | None,
    bias: tl.tensor | None,
    y: tl.tensor,
    rows: int,
    columns: int,
    inputs: int,
    x_scale_step: int,
    split_len: int,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> None:
    """Program (tile, split)."""
    from_row, from_column = tile_of(tl.program_id(0), rows, columns, R, C, GROUP)
    row_R = tl.minimum(from_row + tl.arange(0, R), rows - 1).to(tl.int64)
    column_C = tl.minimum(from_column + tl.arange(0, C), columns - 1).to(tl.int64)
    x_R, w_C = x + row_R * inputs, w + column_C * inputs
    begin = tl.program_id(1) * split_len
    is_int: tl.constexpr = x.dtype.element_ty == tl.int8
    sum_CR = tl.zeros([C, R], tl.int32 if is_int else tl.float32)
    for block in range(begin, tl.minimum(begin + split_len, inputs), K):
        input_K = block + tl.arange(0, K)
        w_CK = load_weights(w_C, input_K, inputs, IS_EVEN)
        x_KR = load_rows(x_R, input_K, inputs, IS_EVEN)
        if is_int:
            sum_CR = tl.dot(w_CK, x_KR, sum_CR, out_dtype=tl.int32)
        else:
            sum_CR = tl.dot(w_CK, x_KR, sum_CR, max_num_imprecise_acc=128)
    y_CR = sum_CR
    if w_scales is not None:
        y_CR = scaled(
            sum_CR,
            x_scales,
            w_scales,
            bias,
            x_scale_step,
            from_row,
            from_column,
            rows,
            columns,
            R,
            C,
        )
    store_tile(y, y_CR, from_row, from_column, tl.program_id(1), rows, columns, R, C)


@triton.jit(do_not_specialize=["rows"])
def blocks_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    w: tl.tensor,
    w_scales: tl.tensor,
    bias: tl.tensor | None,
    y: tl.tensor,
    rows: int,
    columns: int,
    inputs: int,
    split_len: int,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> None:
    """Program (tile, split); a tile's columns are in one block of the weight's scales."""
    from_row, from_column = tile_of(tl.program_id(0), rows, columns, R, C, GROUP)
    row_R = tl.minimum(from_row + tl.arange(0, R), rows - 1).to(tl.int64)
    column_C = tl.minimum(from_column + tl.arange(0, C), columns - 1).to(tl.int64)
    x_R, w_C = x + row_R * inputs, w + column_C * inputs
    w_scales += from_column // K * tl.cdiv(inputs, K)
    begin = tl.program_id(1) * split_len
    sum_CR = tl.zeros([C, R], tl.float32)
    for block in range(begin, tl.minimum(begin + split_len, inputs), K):
        input_K = block + tl.arange(0, K)
        w_CK = load_weights(w_C, input_K, inputs, IS_EVEN)
        x_KR = load_rows(x_R, input_K, inputs, IS_EVEN)
        scale_R = tl.load(x_scales + block // K * rows + row_R)
        scale_R *= tl.load(w_scales + block // K)
        sum_CR += tl.dot(w_CK, x_KR) * scale_R[None, :]
    y_CR = scaled(sum_CR, None, None, bias, 0, from_row, from_column, rows, columns, R, C)
    store_tile(y, y_CR, from_row, from_column, tl.program_id(1), rows, columns, R, C)


@triton.jit(do_not_specialize=["rows"])
def widened_kernel(
    x: tl.tensor,
    w: tl.tensor,
    w_scales: tl.tensor,
    bias: tl.tensor | None,
    y: tl.tensor,
    rows: int,
    columns: int,
    inputs: int,
    x_stride: int,
    split_len: int,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> None:
    """Program (tile, split); without blocks every column has one scale."""
    from_row, from_column = tile_of(tl.program_id(0), rows, columns, R, C, GROUP)
    row_R = tl.minimum(from_row + tl.arange(0, R), rows - 1).to(tl.int64)
    column_C = tl.minimum(from_column + tl.arange(0, C), columns - 1).to(tl.int64)
    x_R, w_C = x + row_R * x_stride, w + column_C * inputs
    block_scales = w_scales + from_column // BLOCK * tl.cdiv(inputs, BLOCK)
    begin = tl.program_id(1) * split_len
    sum_CR = tl.zeros([C, R], tl.float32)
    for block in range(begin, tl.minimum(begin + split_len, inputs), K):
        input_K = block + tl.arange(0, K)
        x_KR = load_rows(x_R, input_K, inputs, IS_EVEN)
        w_CK = e4m3_by_256(load_weights(w_C, input_K, inputs, IS_EVEN)).to(x.dtype.element_ty)
        if HAS_BLOCKS:
            scale = tl.load(block_scales + block // BLOCK) * 256.0
            sum_CR += tl.dot(w_CK, x_KR, input_precision="ieee") * scale
        else:
            sum_CR = tl.dot(w_CK, x_KR, sum_CR, input_precision="ieee")
    if not HAS_BLOCKS:
        sum_CR *= (tl.load(w_scales + column_C) * 256.0)[:, None]
    y_CR = scaled(sum_CR, None, None, bias, 0, from_row, from_column, rows, columns, R, C)
    store_tile(y, y_CR, from_row, from_column, tl.program_id(1), rows, columns, R, C)


@triton.jit
def e4m3_by_256(bits: tl.tensor) -> tl.tensor:
    """Return float8_e4m3fn numbers / 256 in float16, whose exponent bias is larger by 8."""
    wide = bits.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
