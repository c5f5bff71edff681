"""Triton kernels of `LowRankSlots`, whose torch code specifies them.

Two launches for all adapters of a step: `shrink` computes A x of every tile of rows, `expand` adds
B (A x) to the rows' outputs in place. Few rows are too few programs to fill a GPU, so `shrink`
divides their inputs into splits, which `expand` adds in order: without atomics, the bits are
reproducible. Ranks beyond an adapter's are neither read nor computed, and rows without an adapter
are in no tile. Sums are float32; A x is rounded to the format of B before the second product.

Launches do not depend on device values, so they can be captured in a graph and replayed with other
rows and tiles in the same memory.

Legend, and suffixes of blocks: N slots, I inputs, O outputs, P parts, r largest rank of a part, T
rows, S splits; M rows of a tile, K inputs, R ranks, C columns of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.row_tiles import LARGE_TILE, SMALL_TILE, RowTiles


@dataclass(frozen=True, slots=True)
class LoRALaunch:
    """Launch parameters for a tile size.

    inputs, columns:  of a block of 16-bit elements, powers of two
    max_splits:       most splits of the inputs
    """

    inputs: int
    columns: int
    max_splits: int
    num_warps: int
    num_stages: int

    def options(self, element_bytes: int) -> dict[str, Any]:
        """Return Triton's launch options; fusion is explicit because its default may change.

        32-bit elements need more warps to fit into registers.
        """
        return {
            "num_warps": self.num_warps * element_bytes // 2,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


LAUNCHES = {  # by the size of tiles
    SMALL_TILE: LoRALaunch(inputs=64, columns=128, max_splits=8, num_warps=4, num_stages=3),
    LARGE_TILE: LoRALaunch(inputs=64, columns=128, max_splits=1, num_warps=4, num_stages=3),
}
MIN_SPLIT = 512  # inputs
MIN_BLOCK, MAX_BLOCK = 16, 64  # ranks: minimum of tl.dot, maximum of registers


def splits_of(inputs: int, tiles: RowTiles) -> int:
    """Return the number of splits of the inputs in `shrink`; `look_up` has 1."""
    return min(LAUNCHES[tiles.size].max_splits, _blocks(inputs, MIN_SPLIT))


def shrink(
    x: Tensor, a: Tensor, ranks: Tensor, tiles: RowTiles, shrunk: Tensor, *, max_rank: int
) -> None:
    """Multiply rows with their adapters' A.

    x:       [T, I], each row contiguous
    a:       [N, P * max_rank, I]
    ranks:   [N] int32
    shrunk:  [>= rows of tiles, S, P * max_rank] float32; ranks beyond an adapter's are not written
    """
    _, width, inputs = a.shape
    launch, splits = LAUNCHES[tiles.size], shrunk.shape[1]
    block = launch.inputs * 2 // a.itemsize
    split_len = _blocks(_blocks(inputs, splits), block) * block
    assert x.stride(1) == 1
    if len(tiles.tiles) > 0:
        shrink_kernel[_grid(tiles, width, max_rank, splits)](
            x,
            a,
            ranks,
            tiles.rows,
            tiles.tiles,
            shrunk,
            inputs,
            width,
            x.stride(0),
            splits,
            split_len,
            MAX_RANK=max_rank,
            M=tiles.size,
            K=block,
            R=rank_block(max_rank),
            **launch.options(a.itemsize),
        )


def look_up(
    token_ids: Tensor, a: Tensor, ranks: Tensor, tiles: RowTiles, shrunk: Tensor, *, max_rank: int
) -> None:
    """Do what `shrink` does for one-hot inputs.

    token_ids:  [T] int64, each below I
    shrunk:     as in `shrink`, with one split
    """
    _, width, inputs = a.shape
    if len(tiles.tiles) > 0:
        look_up_kernel[_grid(tiles, width, max_rank, 1)](
            token_ids,
            a,
            ranks,
            tiles.rows,
            tiles.tiles,
            shrunk,
            inputs,
            width,
            MAX_RANK=max_rank,
            M=tiles.size,
            R=rank_block(max_rank),
            **LAUNCHES[tiles.size].options(a.itemsize),
        )


def expand(
    shrunk: Tensor, b: Tensor, ranks: Tensor, bounds: Tensor, tiles: RowTiles, y: Tensor
) -> None:
    """Multiply the result of `shrink` with the adapters' B and add it to the outputs.

    shrunk:  [>= rows of tiles, S, P * max_rank] float32
    b:       [N, blocks, max_rank, columns of a block], as in `LowRankSlots`
    ranks:   [N] int32
    bounds:  [P + 1] int32, first column of each part
    y:       [T, O], each row contiguous; changed in place
    """
    _, num_blocks, max_rank, block = b.shape
    launch = LAUNCHES[tiles.size]
    columns = launch.columns if b.itemsize == 2 else launch.columns // 4
    assert y.stride(1) == 1
    if len(tiles.tiles) > 0:
        expand_kernel[(len(tiles.tiles), _blocks(num_blocks * block, columns))](
            shrunk,
            b,
            ranks,
            bounds,
            tiles.rows,
            tiles.tiles,
            y,
            shrunk.shape[2],
            shrunk.shape[1],
            len(bounds) - 1,
            b.stride(0),
            y.stride(0),
            MAX_RANK=max_rank,
            BLOCK=block,
            M=tiles.size,
            R=rank_block(max_rank),
            C=columns,
            **launch.options(b.itemsize),
        )


def rank_block(max_rank: int) -> int:
    """Return the ranks of a block."""
    return min(MAX_BLOCK, max(MIN_BLOCK, 1 << (max_rank - 1).bit_length()))


def _grid(tiles: RowTiles, width: int, max_rank: int, splits: int) -> tuple[int, int, int]:
    blocks = _blocks(max_rank, rank_block(max_rank))
    return len(tiles.tiles), width // max_rank * blocks, splits


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


@triton.jit(do_not_specialize_on_alignment=["rows", "tiles"])
def shrink_kernel(
    x: tl.tensor,
    a: tl.tensor,
    ranks: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    shrunk: tl.tensor,
    inputs: int,
    width: int,
    x_stride: int,
    num_splits: int,
    split_len: int,
    MAX_RANK: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """Program (tile, block of a part's ranks, split)."""
    tile = tiles + tl.program_id(0) * 3
    slot, first, stop = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    rank = tl.load(ranks + slot)
    blocks: tl.constexpr = (MAX_RANK + R - 1) // R
    part, from_rank = tl.program_id(1) // blocks, tl.program_id(1) % blocks * R
    if (first >= stop) | (from_rank >= rank):
        return
    at_M = first + tl.arange(0, M)
    is_row_M = at_M < stop
    x_M = x + tl.load(rows + at_M, mask=is_row_M, other=0).to(tl.int64) * x_stride
    rank_R = from_rank + tl.arange(0, R)
    is_used_R = rank_R < rank
    column_R = part * MAX_RANK + rank_R
    a_R = a + (slot * width + column_R) * inputs
    split = tl.program_id(2)
    begin = split * split_len
    end = tl.minimum(begin + split_len, inputs)
    sum_MR = tl.full([M, R], 0.0, tl.float32)
    for block in range(begin, end, K):
        input_K = block + tl.arange(0, K)
        is_input_K = input_K < end
        x_MK = tl.load(
            x_M[:, None] + input_K[None, :], mask=is_row_M[:, None] & is_input_K[None, :], other=0.0
        )
        a_KR = tl.load(
            a_R[None, :] + input_K[:, None],
            mask=is_used_R[None, :] & is_input_K[:, None],
            other=0.0,
        )
        sum_MR = tl.dot(x_MK.to(a_KR.dtype), a_KR, sum_MR, input_precision="ieee")
    to_M = shrunk + (at_M.to(tl.int64) * num_splits + split) * width
    tl.store(to_M[:, None] + column_R[None, :], sum_MR, mask=is_row_M[:, None] & is_used_R[None, :])


@triton.jit(do_not_specialize_on_alignment=["token_ids", "rows", "tiles"])
def look_up_kernel(
    token_ids: tl.tensor,
    a: tl.tensor,
    ranks: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    shrunk: tl.tensor,
    inputs: int,
    width: int,
    MAX_RANK: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """Program (tile, block of a part's ranks)."""
    tile = tiles + tl.program_id(0) * 3
    slot, first, stop = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    rank = tl.load(ranks + slot)
    blocks: tl.constexpr = (MAX_RANK + R - 1) // R
    part, from_rank = tl.program_id(1) // blocks, tl.program_id(1) % blocks * R
    at_M = first + tl.arange(0, M)
    is_row_M = at_M < stop
    row_M = tl.load(rows + at_M, mask=is_row_M, other=0)
    id_M = tl.load(token_ids + row_M, mask=is_row_M, other=0)
    rank_R = from_rank + tl.arange(0, R)
    column_R = part * MAX_RANK + rank_R
    is_used_MR = is_row_M[:, None] & (rank_R < rank)[None, :]
    a_R = a + (slot * width + column_R) * inputs
    a_MR = tl.load(a_R[None, :] + id_M[:, None], mask=is_used_MR, other=0.0)
    to_M = shrunk + at_M.to(tl.int64) * width
    tl.store(to_M[:, None] + column_R[None, :], a_MR.to(tl.float32), mask=is_used_MR)


@triton.jit(do_not_specialize_on_alignment=["rows", "tiles"])
def expand_kernel(
    shrunk: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    bounds: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    y: tl.tensor,
    width: int,
    num_splits: int,
    num_parts: int,
    b_stride: int,
    y_stride: int,
    MAX_RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Program (tile, block of columns, which may span several parts)."""
    tile = tiles + tl.program_id(0) * 3
    slot, first, stop = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    rank = tl.load(ranks + slot)
    if (first >= stop) | (rank == 0):
        return
    at_M = first + tl.arange(0, M)
    is_row_M = at_M < stop
    from_M = shrunk + at_M.to(tl.int64) * num_splits * width
    from_column = tl.program_id(1) * C
    column_C = from_column + tl.arange(0, C)
    b_C = b + slot * b_stride + column_C // BLOCK * (MAX_RANK * BLOCK) + column_C % BLOCK
    sum_MC = tl.full([M, C], 0.0, tl.float32)
    for part in range(num_parts):
        begin, end = tl.load(bounds + part), tl.load(bounds + part + 1)
        if (begin < from_column + C) & (end > from_column):
            is_column_C = (column_C >= begin) & (column_C < end)
            for from_rank in range(0, rank, R):
                rank_R = from_rank + tl.arange(0, R)
                is_used_R = rank_R < rank
                from_MR = from_M[:, None] + (part * MAX_RANK + rank_R)[None, :]
                is_used_MR = is_row_M[:, None] & is_used_R[None, :]
                shrunk_MR = tl.load(from_MR, mask=is_used_MR, other=0.0)
                for split in range(1, num_splits):
                    shrunk_MR += tl.load(from_MR + split * width, mask=is_used_MR, other=0.0)
                b_RC = tl.load(
                    b_C[None, :] + (rank_R * BLOCK)[:, None],
                    mask=is_used_R[:, None] & is_column_C[None, :],
                    other=0.0,
                )
                sum_MC = tl.dot(shrunk_MR.to(b_RC.dtype), b_RC, sum_MC, input_precision="ieee")
    row_M = tl.load(rows + at_M, mask=is_row_M, other=0).to(tl.int64)
    y_MC = y + (row_M * y_stride)[:, None] + column_C[None, :]
    is_output_MC = is_row_M[:, None] & (column_C < tl.load(bounds + num_parts))[None, :]
    before_MC = tl.load(y_MC, mask=is_output_MC, other=0.0)
    tl.store(y_MC, (before_MC.to(tl.float32) + sum_MC).to(before_MC.dtype), mask=is_output_MC)
