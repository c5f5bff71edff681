"""Triton kernel of `linear_quant` for weights in groups of inputs: int4, int8, MXFP4, NVFP4.

Legend, and suffixes of blocks: as in `products.py` and `groups.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.arch import Arch, arch_of
from remora.kernels.gpu.groups import add_run, constants_of, operands_of, weight_bits
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
from remora.kernels.quantised.quant_formats import MAX_HALF, Fp4GroupWeight, GroupWeight

RUN = 2 * MAX_HALF  # the most inputs of a step
# 4-bit weights are small, so there are more stages.
LAUNCHES = table(
    TileLaunch(rows=16, columns=64, inputs=RUN, num_warps=4, num_stages=6),
    TileLaunch(rows=32, columns=64, inputs=RUN, num_warps=4, num_stages=5),
    TileLaunch(rows=64, columns=64, inputs=RUN, num_warps=4, num_stages=4),
    TileLaunch(rows=MANY_ROWS, columns=128, inputs=RUN, num_warps=8, num_stages=3),
    but={
        Arch.CDNA: (
            TileLaunch(rows=64, columns=128, inputs=RUN, num_warps=8, num_stages=2),
            TileLaunch(rows=MANY_ROWS, columns=64, inputs=RUN, num_warps=8, num_stages=2),
        ),
    },
)
# Decoding takes registers, of which `mma.sync` leaves fewer than tensor cores that read rows from
# shared memory.
_FEW_ROWS = TileLaunch(rows=64, columns=128, inputs=RUN, num_warps=8, num_stages=3)
FP4_LAUNCHES = LAUNCHES | {
    arch: (*LAUNCHES[arch][:-1], _FEW_ROWS) for arch in (Arch.AMPERE, Arch.SMALL)
}
WIDE_LAUNCH = TileLaunch(rows=16, columns=32, inputs=RUN, num_warps=4, num_stages=2)  # of float32


def multiply(x: Tensor, weight: GroupWeight, bias: Tensor | None, y: Tensor) -> None:
    """Compute `linear_quant` with a weight in groups into `y`."""
    assert x.stride(1) == 1
    rows, inputs = x.shape
    launches = FP4_LAUNCHES if isinstance(weight, Fp4GroupWeight) else LAUNCHES
    launch = WIDE_LAUNCH if x.itemsize == 4 else launch_for(launches, arch_of(x.device), rows)
    run_product(
        groups_kernel,
        launch,
        Grid.of(launch, rows, len(weight.values), inputs),
        x,
        (weight.values, *operands_of(weight)),
        bias,
        y,
        strides=(x.stride(0), weight.values.shape[1], len(weight.scales)),
        weight_bytes=weight_bits(weight) / 8,
        IS_EVEN=inputs % (2 * weight.half) == 0,
        **constants_of(weight),
    )


@triton.jit(do_not_specialize=["rows"])
def groups_kernel(
    x: tl.tensor,
    w: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor | None,
    factors: tl.tensor | None,
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
    FORMAT: tl.constexpr,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> None:
    """Program (tile, split)."""
    from_row, from_column = tile_of(tl.program_id(0), rows, columns, R, C, GROUP)
    row_R = tl.minimum(from_row + tl.arange(0, R), rows - 1).to(tl.int64)
    column_C = tl.minimum(from_column + tl.arange(0, C), columns - 1)
    x_R, w_C = x + row_R * x_stride, w + column_C.to(tl.int64) * w_stride
    scales_C = scales + column_C
    zeros_C = scales_C if zeros is None else zeros + column_C
    begin = tl.program_id(1) * split_len
    sum_CR = tl.zeros([C, R], tl.float32)
    for run in range(begin, tl.minimum(begin + split_len, inputs), K):
        low_H = run + tl.arange(0, K // 2)
        sum_CR = add_run(
            sum_CR,
            load_rows(x_R, low_H, inputs, IS_EVEN),
            load_rows(x_R, low_H + K // 2, inputs, IS_EVEN),
            w_C,
            scales_C,
            zeros_C,
            run,
            inputs,
            groups,
            columns,
            FORMAT,
            K,
            GROUP_SIZE,
            IS_EVEN,
        )
    if factors is not None:
        sum_CR *= tl.load(factors + column_C)[:, None]
    y_CR = scaled(sum_CR, None, None, bias, 0, from_row, from_column, rows, columns, R, C)
    store_tile(y, y_CR, from_row, from_column, tl.program_id(1), rows, columns, R, C)
