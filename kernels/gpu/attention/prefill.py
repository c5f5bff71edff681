"""Triton kernel of `attend_extend`, whose torch code specifies it.

The queries of a row that share a K/V head, ordered by token and then by head, are cut into tiles
(FlashAttention-2, arXiv:2307.08691, with heads packed into tiles): K and V are read once for all
heads, only a row's last tile is partly empty, and a row of one token costs one tile. Programs find
their tile from the rows' starts on the device; the grid has one program per row plus one for each
full tile of all tokens. Tiles that see the most keys start first.

Key blocks begin at multiples of their size, and blocks that a query does not see do not change its
bits: a result depends neither on the chunking of the prompt nor on other rows.

Launches do not depend on device values.

Legend, and suffixes of blocks: T tokens, E rows, H heads, K K/V heads, G query heads of a K/V head;
M queries of a tile, N keys, H elements of a head, R rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.arch import Arch, arch_of
from remora.kernels.gpu.attention.steps import (
    attend_block,
    begin_softmax,
    factor_of,
    find_row,
    find_slots,
    row_block,
    score_factors,
)


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """Launch parameters of tiles.

    queries, keys:  queries of a tile and keys of a block of 16-bit elements, powers of two
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, Any]:
        """Return Triton's launch options; fusion is explicit because its default may change."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


# By padded head size. Of five stages Triton uses two for page ids and two for K and V, which load
# the next block during the computation.
LAUNCHES = {
    arch: {
        size: PrefillLaunch(queries, keys, num_warps, num_stages)
        for size, queries, keys, num_stages in zip(
            (64, 128, 256), tile_queries, block_keys, stages, strict=True
        )
    }
    for arch, tile_queries, block_keys, num_warps, stages in (
        (Arch.AMPERE, (128, 128, 64), (64, 32, 32), 8, (5, 5, 5)),
        (Arch.HOPPER, (128, 128, 128), (128, 64, 32), 8, (5, 5, 5)),
        (Arch.BLACKWELL, (128, 128, 128), (128, 64, 32), 8, (5, 5, 5)),
        (Arch.SMALL, (128, 128, 64), (64, 32, 16), 8, (5, 3, 5)),
        (Arch.CDNA, (128, 128, 64), (64, 32, 16), 4, (2, 2, 2)),
    )
}
WIDE = PrefillLaunch(32, 16, 8, 2)  # of 32-bit elements, which tensor cores do not multiply


def attend(
    query: Tensor,
    kv_pages: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    kv_scales: Tensor | None,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> None:
    """Attend each row's tokens to its pages; tensors as in `attend_extend`."""
    num_tokens, num_heads, head_dim = query.shape
    _, _, page_size, num_kv_heads, _ = kv_pages.shape
    num_rows, group = len(lengths), num_heads // num_kv_heads
    launch = launch_of(arch_of(query.device), head_dim, query.itemsize)
    inner, outer = score_factors(scale, soft_cap)
    tiles = num_tiles(num_rows, num_tokens, group, launch.queries)
    extend_kernel[(num_kv_heads, tiles)](
        query,
        kv_pages[0],
        kv_pages[1],
        None if kv_scales is None else kv_scales[0],
        None if kv_scales is None else kv_scales[1],
        sinks,
        tables,
        starts,
        lengths,
        out,
        num_rows,
        window,
        inner,
        outer,
        query.stride(0),
        tables.stride(0),
        out.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        FACTOR=factor_of(query, kv_pages),
        R=row_block(num_rows),
        M=launch.queries,
        N=launch.keys,
        H=triton.next_power_of_2(head_dim),
        **launch.options(),
    )


def num_tiles(num_rows: int, num_tokens: int, group: int, queries: int) -> int:
    """Return the largest possible number of tiles for any assignment of tokens to rows."""
    return num_rows + num_tokens * group // queries


def launch_of(arch: Arch, head_dim: int, element_bytes: int) -> PrefillLaunch:
    """Return the launch for a head size and an element size."""
    if element_bytes == 4:
        return WIDE
    return LAUNCHES[arch][min(256, max(64, triton.next_power_of_2(head_dim)))]


@triton.jit
def find_tile(
    starts: tl.tensor,
    item: tl.tensor,
    num_rows: int,
    G: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the row of a tile and the tile's index in that row."""
    at_R = tl.arange(0, R)
    is_row_R = at_R < num_rows
    begin_R = tl.load(starts + at_R, mask=is_row_R, other=0)
    end_R = tl.load(starts + at_R + 1, mask=is_row_R, other=0)
    row, first = find_row(tl.cdiv((end_R - begin_R) * G, M), item)
    return row, item - first


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["tables", "starts", "lengths"],
)
def extend_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    sinks: tl.tensor,
    tables: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    window: int | None,
    inner: float,
    outer: float | None,
    query_stride: int,
    table_stride: int,
    out_stride: int,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FACTOR: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
) -> None:
    """Program (K/V head, tile of queries); the last tiles start first."""
    kv_head, num_kv_heads = tl.program_id(0), tl.num_programs(0)
    row, tile = find_tile(starts, tl.num_programs(1) - 1 - tl.program_id(1), num_rows, GROUP, R, M)
    if row >= num_rows:
        return
    stop, length = tl.load(starts + row + 1), tl.load(lengths + row)
    at_H, at_M = tl.arange(0, H), tile * M + tl.arange(0, M)
    token_M = tl.load(starts + row) + at_M // GROUP
    position_M = token_M - stop + length
    is_query_MH = (token_M < stop)[:, None] & (at_H < HEAD_DIM)[None, :]
    head_M = kv_head * GROUP + at_M % GROUP
    in_token_MH = (head_M * HEAD_DIM)[:, None] + at_H[None, :]
    from_MH = query + (token_M.to(tl.int64) * query_stride)[:, None] + in_token_MH
    query_MH = tl.load(from_MH, mask=is_query_MH, other=0.0)
    table = tables + row.to(tl.int64) * table_stride
    # All queries see keys [begin, whole); keys [whole, end) are masked per query.
    lowest, end = tl.min(position_M, 0), tl.minimum(tl.max(position_M, 0) + 1, length)
    begin, whole = 0, (lowest + 1) // N * N
    if window is not None:
        begin = tl.maximum(lowest + 1 - window, 0) // N * N
        whole = begin
    top_M, total_M = begin_softmax(sinks, head_M, token_M < stop, True, M)
    sum_MH = tl.full([M, H], 0.0, tl.float32)
    for block in range(begin, whole, N):
        slot_N, is_key_N = find_slots(table, block + tl.arange(0, N), end, PAGE)
        top_M, total_M, sum_MH = attend_block(
            query_MH, keys, values, key_scales, value_scales, slot_N, is_key_N, is_key_N[None, :],
            kv_head, num_kv_heads, inner, outer, top_M, total_M, sum_MH, HEAD_DIM, H, False, FACTOR,
        )  # fmt: skip
    for block in range(whole, end, N):
        at_N = block + tl.arange(0, N)
        slot_N, is_key_N = find_slots(table, at_N, end, PAGE)
        is_seen_MN = at_N[None, :] <= position_M[:, None]
        if window is not None:
            is_seen_MN &= at_N[None, :] > (position_M - window)[:, None]
            is_key_N &= at_N > lowest - window  # earlier pages may have a new owner
        top_M, total_M, sum_MH = attend_block(
            query_MH, keys, values, key_scales, value_scales, slot_N, is_key_N, is_seen_MN,
            kv_head, num_kv_heads, inner, outer, top_M, total_M, sum_MH, HEAD_DIM, H, True, FACTOR,
        )  # fmt: skip
    sum_MH = sum_MH / tl.maximum(total_M, 1e-30)[:, None]
    to_MH = out + (token_M.to(tl.int64) * out_stride)[:, None] + in_token_MH
    tl.store(to_MH, sum_MH.to(out.dtype.element_ty), mask=is_query_MH)
