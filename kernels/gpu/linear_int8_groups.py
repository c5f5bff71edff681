"""Triton kernel of `linear_quant` for 8-bit integers with scales and zero points of groups.

Weights are widened in registers; rows are not quantised. An integer minus its zero point is exact
in 16 bits, so scales are applied to a group's sum in float32.

Legend, and suffixes of blocks: as in `products.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.arch import arch_of
from remora.kernels.gpu.products import (
    Grid,
    launch_of_widened,
    load_rows,
    load_weights,
    run_product,
    scaled,
    store_tile,
    tile_of,
)
from remora.kernels.quantised.quant_formats import Int8GroupWeight


def multiply(x: Tensor, weight: Int8GroupWeight, bias: Tensor | None, y: Tensor) -> None:
    """Compute `linear_quant` with 8-bit integers in groups into `y`."""
    assert x.stride(1) == 1
    rows, inputs = x.shape
    launch = launch_of_widened(arch_of(x.device), rows, x.itemsize)
    block = min(launch.inputs, weight.group_size)  # of inputs in one group
    run_product(
        int8_groups_kernel,
        launch,
        Grid.of(launch, rows, len(weight.values), inputs),
        x,
        (weight.values, weight.scales, weight.zeros),
        bias,
        y,
        strides=(x.stride(0),),
        weight_bytes=1,
        K=block,
        GROUP_SIZE=weight.group_size,
        IS_EVEN=inputs % block == 0,
    )


@triton.jit(do_not_specialize=["rows"])
def int8_groups_kernel(
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
    split_len: int,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> None:
    """Program (tile, split)."""
    from_row, from_column = tile_of(tl.program_id(0), rows, columns, R, C, GROUP)
    row_R = tl.minimum(from_row + tl.arange(0, R), rows - 1).to(tl.int64)
    column_C = tl.minimum(from_column + tl.arange(0, C), columns - 1)
    x_R, w_C = x + row_R * x_stride, w + column_C.to(tl.int64) * inputs
    begin = tl.program_id(1) * split_len
    sum_CR = tl.zeros([C, R], tl.float32)
    for block in range(begin, tl.minimum(begin + split_len, inputs), K):
        input_K = block + tl.arange(0, K)
        x_KR = load_rows(x_R, input_K, inputs, IS_EVEN)
        w_CK = load_weights(w_C, input_K, inputs, IS_EVEN)
        at_C = (block // GROUP_SIZE) * columns + column_C
        zero_C = tl.load(zeros + at_C).to(tl.int16)
        w_CK = (w_CK.to(tl.int16) - zero_C[:, None]).to(x.dtype.element_ty)
        scale_C = tl.load(scales + at_C).to(tl.float32)
        sum_CR += tl.dot(w_CK, x_KR, input_precision="ieee") * scale_C[:, None]
    y_CR = scaled(sum_CR, None, None, bias, 0, from_row, from_column, rows, columns, R, C)
    store_tile(y, y_CR, from_row, from_column, tl.program_id(1), rows, columns, R, C)
