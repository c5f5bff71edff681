"""Triton kernel of `kernels/linear_invariant.py`: batch-invariant products.

The tile and the order of sums are the same for any number of rows: inputs are summed in parts of a
fixed length, each from zero, and the parts are added in order. Whether a program computes all parts
of a tile, or one part because there are too few tiles to fill the GPU, does not change the bits.

Legend, and suffixes of blocks: as in `products.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.products import (
    WIDE_LAUNCH,
    Grid,
    TileLaunch,
    load_rows,
    load_weights,
    run_product,
    scaled,
    store_tile,
    tile_of,
)

PART = 1024  # inputs
ENOUGH_TILES = 132  # one per multiprocessor of an H200
LAUNCH = TileLaunch(rows=64, columns=128, inputs=64, num_warps=4, num_stages=4)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Compute `linear_invariant` into `y`."""
    if y.numel() == 0:
        return
    (rows, inputs), columns = x.shape, len(weight)
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    launch = LAUNCH if x.itemsize == 2 else WIDE_LAUNCH
    tiles = triton.cdiv(rows, launch.rows) * triton.cdiv(columns, launch.columns)
    parts = triton.cdiv(inputs, PART)
    is_divided = parts > 1 and tiles < ENOUGH_TILES
    run_product(
        invariant_kernel,
        launch,
        Grid(tiles, parts, PART) if is_divided else Grid(tiles, 1, inputs),
        x,
        (weight,),
        bias,
        y,
        strides=(x.stride(0),),
        weight_bytes=x.itemsize,
        PART=PART,
        K=launch.inputs,
        IS_EVEN=inputs % launch.inputs == 0,
    )


@triton.jit(do_not_specialize=["rows"])
def invariant_kernel(
    x: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor | None,
    y: tl.tensor,
    rows: int,
    columns: int,
    inputs: int,
    x_stride: int,
    split_len: int,
    PART: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> None:
    """Program (tile, split), where a split is one part or all."""
    from_row, from_column = tile_of(tl.program_id(0), rows, columns, R, C, GROUP)
    row_R = tl.minimum(from_row + tl.arange(0, R), rows - 1).to(tl.int64)
    column_C = tl.minimum(from_column + tl.arange(0, C), columns - 1).to(tl.int64)
    x_R, w_C = x + row_R * x_stride, w + column_C * inputs
    begin = tl.program_id(1) * split_len
    sum_CR = tl.full([C, R], 0.0, tl.float32)
    for part in range(begin, tl.minimum(begin + split_len, inputs), PART):
        part_CR = tl.full([C, R], 0.0, tl.float32)
        for block in range(part, tl.minimum(part + PART, inputs), K):
            input_K = block + tl.arange(0, K)
            w_CK = load_weights(w_C, input_K, inputs, IS_EVEN)
            x_KR = load_rows(x_R, input_K, inputs, IS_EVEN)
            part_CR = tl.dot(w_CK, x_KR, part_CR, input_precision="ieee")
        sum_CR += part_CR
    y_CR = scaled(sum_CR, None, None, bias, 0, from_row, from_column, rows, columns, R, C)
    store_tile(y, y_CR, from_row, from_column, tl.program_id(1), rows, columns, R, C)
