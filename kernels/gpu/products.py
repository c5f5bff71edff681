"""Launch parameters and Triton functions that all products with a weight [outputs, inputs] share.

A program computes a tile of y = x W^T, transposed: W x^T. A weight's outputs are then the long side
of the tensor cores' instruction, so that 16 rows suffice, and weights dequantised in registers are
its register operand. Few rows have too few tiles to fill a GPU; their inputs are divided into
splits, whose sums another launch adds in order. Without atomics, the bits are reproducible.

Legend, and suffixes of blocks: R rows of a tile, C columns of y (outputs), K inputs of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.arch import Arch, arch_of

WANTED_PROGRAMS = 264  # two per multiprocessor of an H200
MANY_ROWS = 128
MIN_STEPS, MAX_SPLITS = 4, 8  # least blocks of inputs per split; most splits
REDUCED = 512  # columns of a program that adds splits
GROUP = 8  # tiles of rows that share a weight in the L2 cache


@dataclass(frozen=True, slots=True)
class TileLaunch:
    """Launch parameters of a tile: rows, columns, and inputs of a block, powers of two.

    num_stages:  upper bound; reduced to fit into shared memory
    """

    rows: int
    columns: int
    inputs: int
    num_warps: int
    num_stages: int

    def options(self, arch: Arch, row_bytes: float, weight_bytes: float) -> dict[str, Any]:
        """Return Triton's launch options; fusion is explicit because its default may change.

        row_bytes, weight_bytes:  bytes of an element in memory
        """
        stage = self.inputs * (self.rows * row_bytes + self.columns * weight_bytes)
        spare = self.rows * self.columns * 4 if arch is Arch.CDNA else 1024
        fits = int((arch.shared_bytes - spare) // stage)
        return {
            "num_warps": self.num_warps,
            "num_stages": max(1, min(self.num_stages, fits)),
            "enable_fp_fusion": True,
        }


@dataclass(frozen=True, slots=True)
class Grid:
    """Programs of a product: tiles, and splits of the inputs in multiples of a block."""

    tiles: int
    splits: int
    split_len: int

    @classmethod
    def of(cls, launch: TileLaunch, rows: int, columns: int, inputs: int) -> Grid:
        """Divide a product into tiles and splits; products of many rows have enough tiles."""
        tiles = triton.cdiv(rows, launch.rows) * triton.cdiv(columns, launch.columns)
        steps = triton.cdiv(inputs, launch.inputs)
        wanted = triton.cdiv(WANTED_PROGRAMS, tiles)
        most = MAX_SPLITS if launch.rows < MANY_ROWS else 1
        splits = max(1, min(most, wanted, steps // MIN_STEPS))
        split_len = triton.cdiv(steps, splits) * launch.inputs
        return cls(tiles, triton.cdiv(inputs, split_len), split_len)


Launches = dict[Arch, tuple[TileLaunch, ...]]


def table(*launches: TileLaunch, but: Launches | None = None) -> Launches:
    """Return a launch table.

    launches:  for every architecture, by ascending rows
    but:       replacements for some architectures, matched by rows
    """
    others = {arch: {each.rows: each for each in few} for arch, few in (but or {}).items()}
    return {
        arch: tuple(others.get(arch, {}).get(launch.rows, launch) for launch in launches)
        for arch in Arch
    }


def launch_for(launches: Launches, arch: Arch, rows: int) -> TileLaunch:
    """Return the first launch whose tiles hold all rows, or the last."""
    of_arch = launches[arch]
    return next((launch for launch in of_arch if launch.rows >= rows), of_arch[-1])


# Weights of 8 bits that are widened to the type of the rows in registers.
WIDENED_LAUNCHES = table(
    TileLaunch(rows=16, columns=64, inputs=128, num_warps=4, num_stages=4),
    TileLaunch(rows=64, columns=64, inputs=128, num_warps=4, num_stages=3),
    TileLaunch(rows=MANY_ROWS, columns=128, inputs=64, num_warps=8, num_stages=3),
)
# float32, which tensor cores do not multiply.
WIDE_LAUNCH = TileLaunch(rows=16, columns=64, inputs=32, num_warps=4, num_stages=2)


def launch_of_widened(arch: Arch, rows: int, item_bytes: int) -> TileLaunch:
    """Return the launch for widened weights and rows of so many bytes a number."""
    return WIDE_LAUNCH if item_bytes == 4 else launch_for(WIDENED_LAUNCHES, arch, rows)


def run_product(
    kernel: Any,
    launch: TileLaunch,
    grid: Grid,
    x: Tensor,
    operands: Sequence[Tensor | None],
    bias: Tensor | None,
    y: Tensor,
    *,
    strides: Sequence[int] = (),
    scales: tuple[Tensor, Tensor] | tuple[()] = (),
    weight_bytes: float,
    **constants: Any,
) -> None:
    """Launch a kernel that computes tiles of y [rows, columns], and add splits.

    kernel:        takes x, operands, scales (None with splits), bias (None with splits), y or the
                   sums of splits, rows, columns, inputs, strides, the length of a split, constants
    scales:        of rows and of columns, which the kernel applies to its sum; int8 rows have sums
                   of int32
    weight_bytes:  bytes of a weight's element in memory
    """
    (rows, inputs), columns = x.shape, y.shape[1]
    sums = None
    if grid.splits > 1:
        dtype = torch.int32 if x.dtype == torch.int8 else torch.float32
        sums = x.new_empty((grid.splits, rows, columns), dtype=dtype)
    kernel[(grid.tiles, grid.splits)](
        x,
        *operands,
        *(scales if sums is None else (None,) * len(scales)),
        bias if sums is None else None,
        y if sums is None else sums,
        rows,
        columns,
        inputs,
        *strides,
        grid.split_len,
        R=launch.rows,
        C=launch.columns,
        GROUP=GROUP,
        **constants,
        **launch.options(arch_of(x.device), x.itemsize, weight_bytes),
    )
    if sums is not None:
        reduce_splits(sums, y, bias, *scales)


def reduce_splits(
    sums: Tensor,
    y: Tensor,
    bias: Tensor | None,
    row_scales: Tensor | None = None,
    column_scales: Tensor | None = None,
) -> None:
    """Add splits in order, scale the sum and add a bias.

    sums:           [splits, rows, columns] float32 or int32
    row_scales:     [rows], or [1] for all
    column_scales:  [columns]
    y:              [rows, columns], overwritten
    """
    splits, rows, columns = sums.shape
    reduce_splits_kernel[(rows, triton.cdiv(columns, REDUCED))](
        sums,
        row_scales,
        column_scales,
        bias,
        y,
        rows,
        columns,
        splits,
        sums.stride(0),
        step_of(row_scales),
        C=REDUCED,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
    )


def step_of(row_scales: Tensor | None) -> int:
    """Return the stride of row scales: 0 for one scale of all rows."""
    return int(row_scales is not None and len(row_scales) > 1)


@triton.jit(do_not_specialize=["rows", "num_splits", "split_stride", "row_scale_step"])
def reduce_splits_kernel(
    sums: tl.tensor,
    row_scales: tl.tensor | None,
    column_scales: tl.tensor | None,
    bias: tl.tensor | None,
    y: tl.tensor,
    rows: int,
    columns: int,
    num_splits: int,
    split_stride: int,
    row_scale_step: int,
    C: tl.constexpr,
) -> None:
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    is_column_C = column_C < columns
    at_C = row * columns + column_C
    sum_C = tl.load(sums + at_C, mask=is_column_C, other=0)
    for _ in range(1, num_splits):
        sums += split_stride
        sum_C += tl.load(sums + at_C, mask=is_column_C, other=0)
    y_C = sum_C.to(tl.float32)
    if column_scales is not None:
        y_C *= tl.load(column_scales + column_C, mask=is_column_C, other=0.0)
    if row_scales is not None:
        y_C *= tl.load(row_scales + row * row_scale_step)
    if bias is not None:
        y_C += tl.load(bias + column_C, mask=is_column_C, other=0.0).to(tl.float32)
    tl.store(y + at_C, y_C.to(y.dtype.element_ty), mask=is_column_C)


@triton.jit
def tile_of(
    tile: tl.tensor,
    rows: int,
    columns: int,
    R: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first row and column of a tile; consecutive tiles share the L2 cache."""
    row_tiles, column_tiles = tl.cdiv(rows, R), tl.cdiv(columns, C)
    group = tile // (GROUP * column_tiles)
    first = group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    within = tile - group * GROUP * column_tiles
    return (first + within % size) * R, within // size * C


@triton.jit
def load_weights(
    w_C: tl.tensor, input_K: tl.tensor, inputs: int, IS_EVEN: tl.constexpr
) -> tl.tensor:
    """Return a block [C, K] of a weight; IS_EVEN: K divides the inputs."""
    at_CK = w_C[:, None] + input_K[None, :]
    if IS_EVEN:
        w_CK = tl.load(at_CK)
    else:
        w_CK = tl.load(at_CK, mask=(input_K < inputs)[None, :], other=0.0)
    return w_CK


@triton.jit
def load_rows(x_R: tl.tensor, input_K: tl.tensor, inputs: int, IS_EVEN: tl.constexpr) -> tl.tensor:
    """Return a block [K, R] of rows."""
    at_KR = x_R[None, :] + input_K[:, None]
    if IS_EVEN:
        x_KR = tl.load(at_KR)
    else:
        x_KR = tl.load(at_KR, mask=(input_K < inputs)[:, None], other=0.0)
    return x_KR


@triton.jit
def store_tile(
    y: tl.tensor,
    sum_CR: tl.tensor,
    from_row: tl.tensor,
    from_column: tl.tensor,
    split: tl.tensor,
    rows: int,
    columns: int,
    R: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Store a tile of [splits, rows, columns], in the type of the memory."""
    row_R = from_row + tl.arange(0, R)
    column_C = from_column + tl.arange(0, C)
    at_R = (split.to(tl.int64) * rows + row_R) * columns
    is_there_RC = (row_R < rows)[:, None] & (column_C < columns)[None, :]
    y_RC = tl.trans(sum_CR).to(y.dtype.element_ty)
    tl.store(y + at_R[:, None] + column_C[None, :], y_RC, mask=is_there_RC)


@triton.jit
def scaled(
    sum_CR: tl.tensor,
    row_scales: tl.tensor | None,
    column_scales: tl.tensor | None,
    bias: tl.tensor | None,
    row_scale_step: int,
    from_row: tl.tensor,
    from_column: tl.tensor,
    rows: int,
    columns: int,
    R: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Scale float32 sums of a tile and add a bias, as `reduce_splits_kernel` does."""
    column_C = tl.minimum(from_column + tl.arange(0, C), columns - 1)
    y_CR = sum_CR.to(tl.float32)
    if column_scales is not None:
        y_CR *= tl.load(column_scales + column_C)[:, None]
    if row_scales is not None:
        row_R = tl.minimum(from_row + tl.arange(0, R), rows - 1)
        y_CR *= tl.load(row_scales + row_R * row_scale_step)[None, :]
    if bias is not None:
        y_CR += tl.load(bias + column_C).to(tl.float32)[:, None]
    return y_CR
