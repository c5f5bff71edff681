"""Triton kernels of `attend_decode_paged`, whose torch code specifies them.

Rows are too few to fill a GPU, so their keys are divided into splits, one program each (flash
decoding, after FlashAttention, arXiv:2205.14135); `merge_kernel` combines the splits of a row.
`plan_kernel` derives the splits of all rows from the lengths on the device, once for all layers of
a step: a long row gets splits in proportion to its share of all keys, and the grid has one program
per row plus one for each possible further split. Query heads of a K/V head are rows of one product,
so K and V are read once.

Launches do not depend on device values, so they can be captured in a graph and replayed with other
lengths and pages in the same memory.

Legend, and suffixes of blocks: D rows, H heads, K K/V heads, G query heads of a K/V head, P pages
of a table, I items (splits of all rows, numbered row after row); M queries, N keys, H elements of a
head, R rows, S splits of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.attention.split_plan import SplitPlan
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
class DecodeLaunch:
    """Launch parameters of `split_kernel`.

    keys:      keys of a block of 16-bit elements, a power of two
    programs:  programs that run concurrently on the GPU
    """

    keys: int
    num_warps: int
    num_stages: int
    programs: int

    def block(self, query_bytes: int, page_bytes: int) -> int:
        """Return the keys of a block for these element sizes.

        8-bit elements are widened in registers, so a block has half as many; 32-bit queries, which
        tensor cores do not multiply, have a quarter.
        """
        return max(16, self.keys // (4 if query_bytes == 4 else 2 // page_bytes))

    def options(self, query_bytes: int, page_bytes: int) -> dict[str, Any]:
        """Return Triton's launch options; fusion is explicit because its default may change.

        32-bit elements need more warps to fit into registers; 8-bit blocks are smaller and get more
        stages.
        """
        return {
            "num_warps": 8 if query_bytes == 4 else self.num_warps,
            "num_stages": self.num_stages if page_bytes > 1 else 2 * (self.num_stages - 1),
            "enable_fp_fusion": True,
        }


# By padded head size. Of five stages Triton uses two for page ids and two for K and V, which load
# the next block during the computation: 32 KiB for each program on Hopper.
LAUNCHES = {
    arch: {
        size: DecodeLaunch(keys, 4, num_stages, programs)
        for size, keys, num_stages in zip((64, 128, 256), block_keys, stages, strict=True)
    }
    for arch, block_keys, stages, programs in (
        (Arch.AMPERE, (64, 32, 16), (5, 5, 5), 108 * 3),
        (Arch.HOPPER, (64, 64, 32), (7, 5, 5), 132 * 3),
        (Arch.BLACKWELL, (64, 64, 32), (7, 5, 5), 148 * 3),
        (Arch.SMALL, (64, 32, 16), (5, 5, 5), 84 * 2),
        (Arch.CDNA, (32, 32, 16), (2, 2, 2), 304 * 2),
    )
}
MIN_SPLIT = 128  # least keys of a split
ROUNDS = 2  # of programs for long splits, so that the last round leaves less of the GPU idle
MIN_QUERIES, MAX_QUERIES = 16, 64  # of a block: minimum of tl.dot, maximum of registers
MERGE_SPLITS = 16  # splits that `merge_kernel` reads at once
ITEM = 5  # numbers of an item in `SplitPlan`


def plan(
    query: Tensor,
    kv_pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    window: int | None,
    fixed_split: bool,
    max_splits: int,
    split_tokens: int,
) -> SplitPlan:
    """Divide rows into splits; arguments as in `attend_decode_paged`."""
    num_rows, num_heads, head_dim = query.shape
    _, _, page_size, num_kv_heads, _ = kv_pages.shape
    group = num_heads // num_kv_heads
    launch = launch_of(arch_of(query.device), head_dim)
    min_split = split_tokens if fixed_split else MIN_SPLIT
    if window is not None and window <= min_split:
        # Each row is one split: nothing has to be merged.
        num_items, splits, fixed_split = num_rows, 1, True
    elif fixed_split:
        splits = min(max_splits, triton.cdiv(tables.shape[1] * page_size, split_tokens))
        num_items = num_rows * splits
    else:
        programs_of_row = num_kv_heads * triton.cdiv(group, queries_of(group))
        splits = max(1, launch.programs // programs_of_row)
        num_items = num_rows + splits * ROUNDS
    return plan_items(
        lengths,
        num_items,
        splits,
        window=window,
        fixed_split=fixed_split,
        min_split=min_split,
        keys=launch.block(query.itemsize, kv_pages.itemsize),
    )


def plan_items(
    lengths: Tensor,
    num_items: int,
    num_splits: int,
    *,
    window: int | None,
    fixed_split: bool,
    min_split: int,
    keys: int,
) -> SplitPlan:
    """Divide rows of `lengths` [D] into splits in multiples of a block of keys.

    num_splits:  most splits of a row if they are fixed, otherwise extra splits of all rows in one
                 round
    """
    num_rows = len(lengths)
    items = lengths.new_empty((num_items, ITEM), dtype=torch.int32)
    rows = lengths.new_empty((num_rows, 2), dtype=torch.int32)
    plan_kernel[(num_items,)](
        lengths,
        items,
        rows,
        num_rows,
        num_splits,
        2**30 if window is None else window,
        FIXED=fixed_split,
        MIN_BLOCKS=triton.cdiv(min_split, keys),
        R=row_block(num_rows),
        N=keys,
        ITEM=ITEM,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return SplitPlan(items, rows)


def queries_of(group: int) -> int:
    """Return the queries of a block."""
    wanted: int = triton.next_power_of_2(group)
    return min(MAX_QUERIES, max(MIN_QUERIES, wanted))


def attend(
    query: Tensor,
    kv_pages: Tensor,
    tables: Tensor,
    kv_scales: Tensor | None,
    out: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    plan: SplitPlan,
) -> None:
    """Attend each row to its pages; tensors as in `attend_decode_paged`."""
    _, num_heads, head_dim = query.shape
    _, _, page_size, num_kv_heads, _ = kv_pages.shape
    group, num_items = num_heads // num_kv_heads, len(plan.items)
    launch = launch_of(arch_of(query.device), head_dim)
    sizes = (query.itemsize, kv_pages.itemsize)
    queries = queries_of(group)
    sums = query.new_empty((num_items, num_heads, head_dim), dtype=torch.float32)
    weights = query.new_empty((num_items, num_heads), dtype=torch.float32)
    inner, outer = score_factors(scale, soft_cap)
    split_kernel[(num_kv_heads * triton.cdiv(group, queries), num_items)](
        query,
        kv_pages[0],
        kv_pages[1],
        None if kv_scales is None else kv_scales[0],
        None if kv_scales is None else kv_scales[1],
        sinks,
        tables,
        plan.items,
        out,
        sums,
        weights,
        inner,
        outer,
        query.stride(0),
        tables.stride(0),
        out.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        FACTOR=factor_of(query, kv_pages),
        ITEM=ITEM,
        M=queries,
        N=launch.block(*sizes),
        H=triton.next_power_of_2(head_dim),
        **launch.options(*sizes),
    )
    merge(sums, weights, plan.rows, out)


def merge(sums: Tensor, weights: Tensor, rows: Tensor, out: Tensor) -> None:
    """Combine the splits of rows that have several; launches nothing if no row can.

    sums:     [I, H, head_dim] float32, weighted mean of V over each split
    weights:  [I, H] float32, base-2 logarithms of the splits' softmax sums
    rows:     [D, 2] int32, as in `SplitPlan`
    out:      [D, H, head_dim], each row contiguous; rows of one split are not written
    """
    num_rows, num_heads, head_dim = out.shape
    if len(sums) == num_rows:
        return
    merge_kernel[(num_heads, num_rows)](
        sums,
        weights,
        rows,
        out,
        num_heads,
        out.stride(0),
        HEAD_DIM=head_dim,
        S=MERGE_SPLITS,
        H=triton.next_power_of_2(head_dim),
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
    )


def launch_of(arch: Arch, head_dim: int) -> DecodeLaunch:
    """Return the launch for a head size."""
    return LAUNCHES[arch][min(256, max(64, triton.next_power_of_2(head_dim)))]


@triton.jit
def find_split(
    lengths: tl.tensor,
    item: tl.tensor,
    num_rows: int,
    num_splits: int,
    window: int,
    FIXED: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return an item's row, the row's first item and number of items, and the item's key range.

    num_splits:  FIXED: most splits of a row; otherwise extra splits of all rows in one round
    Splits of a row have equal length, and none is empty unless the row is.
    """
    at_R = tl.arange(0, R)
    spans_R = tl.minimum(tl.load(lengths + at_R, mask=at_R < num_rows, other=0), window)
    blocks_R = tl.cdiv(spans_R, N)
    if FIXED:
        longest_R = tl.maximum(tl.cdiv(blocks_R, num_splits), MIN_BLOCKS)
    else:
        all_blocks = tl.sum(blocks_R, 0)
        several_rounds = tl.cdiv(all_blocks, tl.num_programs(1) - num_rows)
        longest = tl.minimum(
            tl.cdiv(all_blocks, num_splits), tl.maximum(several_rounds, 4 * MIN_BLOCKS)
        )
        longest_R = tl.full([R], 1, tl.int32) * tl.maximum(longest, MIN_BLOCKS)
    counts_R = tl.where(at_R < num_rows, tl.maximum(tl.cdiv(blocks_R, longest_R), 1), 0)
    row, first = find_row(counts_R, item)
    count = tl.maximum(tl.sum(tl.where(at_R == row, counts_R, 0), 0), 1)
    blocks = tl.sum(tl.where(at_R == row, blocks_R, 0), 0)
    length = tl.load(lengths + row, mask=row < num_rows, other=0)
    split = tl.cdiv(blocks, count) * N
    begin = tl.maximum(length - window, 0) + (item - first) * split
    return row, first, count, begin, tl.minimum(begin + split, length)


@triton.jit(
    do_not_specialize=["num_rows", "num_splits", "window"],
    do_not_specialize_on_alignment=["lengths"],
)
def plan_kernel(
    lengths: tl.tensor,
    items: tl.tensor,
    rows: tl.tensor,
    num_rows: int,
    num_splits: int,
    window: int,
    FIXED: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    ITEM: tl.constexpr,
) -> None:
    """Program (item)."""
    item = tl.program_id(0)
    row, first, count, begin, end = find_split(
        lengths, item, num_rows, num_splits, window, FIXED, MIN_BLOCKS, R, N
    )
    to = items + item * ITEM
    tl.store(to, tl.where(row < num_rows, row, -1))
    tl.store(to + 1, first)
    tl.store(to + 2, count)
    tl.store(to + 3, begin)
    tl.store(to + 4, end)
    if (row < num_rows) & (item == first):
        tl.store(rows + row * 2, first)
        tl.store(rows + row * 2 + 1, count)


@triton.jit
def load_item(
    items: tl.tensor, item: tl.tensor, ITEM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return an item's row, the row's first item and number of items, and the item's key range."""
    at = items + item * ITEM
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables"])
def split_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    sinks: tl.tensor,
    tables: tl.tensor,
    items: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    weights: tl.tensor,
    inner: float,
    outer: float,
    query_stride: int,
    table_stride: int,
    out_stride: int,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FACTOR: tl.constexpr,
    ITEM: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
) -> None:
    """Program (block of a K/V head's queries, item); writes a row of one item to `out`."""
    item = tl.program_id(1)
    row, first, count, begin, end = load_item(items, item, ITEM)
    if row < 0:
        return
    tiles: tl.constexpr = (GROUP + M - 1) // M
    kv_head, num_kv_heads = tl.program_id(0) // tiles, tl.num_programs(0) // tiles
    in_group_M = tl.program_id(0) % tiles * M + tl.arange(0, M)
    head_M = kv_head * GROUP + in_group_M
    at_H = tl.arange(0, H)
    is_query_MH = (in_group_M < GROUP)[:, None] & (at_H < HEAD_DIM)[None, :]
    at_MH = (head_M * HEAD_DIM)[:, None] + at_H[None, :]
    query_MH = tl.load(query + row.to(tl.int64) * query_stride + at_MH, mask=is_query_MH, other=0.0)
    table = tables + row.to(tl.int64) * table_stride
    top_M, total_M = begin_softmax(sinks, head_M, in_group_M < GROUP, item == first, M)
    sum_MH = tl.full([M, H], 0.0, tl.float32)
    for block in range(begin, end, N):
        slot_N, is_key_N = find_slots(table, block + tl.arange(0, N), end, PAGE)
        top_M, total_M, sum_MH = attend_block(
            query_MH, keys, values, key_scales, value_scales, slot_N, is_key_N, is_key_N[None, :],
            kv_head, num_kv_heads, inner, outer, top_M, total_M, sum_MH, HEAD_DIM, H, True, FACTOR,
        )  # fmt: skip
    # The sum of weights is 0 for a row without keys and at least 1 for others.
    sum_MH = sum_MH / tl.maximum(total_M, 1e-30)[:, None]
    if count == 1:
        to_MH = out + row.to(tl.int64) * out_stride + at_MH
        tl.store(to_MH, sum_MH.to(out.dtype.element_ty), mask=is_query_MH)
    else:
        num_heads = num_kv_heads * GROUP
        to = item.to(tl.int64) * num_heads
        tl.store(sums + to * HEAD_DIM + at_MH, sum_MH, mask=is_query_MH)
        tl.store(weights + to + head_M, top_M + tl.log2(total_M), mask=in_group_M < GROUP)


@triton.jit
def merge_kernel(
    sums: tl.tensor,
    weights: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    num_heads: int,
    out_stride: int,
    HEAD_DIM: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
) -> None:
    """Program (head, row)."""
    head, row = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(rows + row * 2), tl.load(rows + row * 2 + 1)
    if count == 1:
        return
    at_H = tl.arange(0, H)
    is_element_H = at_H < HEAD_DIM
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    sum_H = tl.full([H], 0.0, tl.float32)
    for split in range(0, count, S):
        at_S = split + tl.arange(0, S)
        is_split_S = at_S < count
        from_S = (first + at_S).to(tl.int64) * num_heads + head
        weight_S = tl.load(weights + from_S, mask=is_split_S, other=float("-inf"))
        sum_SH = tl.load(
            sums + (from_S * HEAD_DIM)[:, None] + at_H[None, :],
            mask=is_split_S[:, None] & is_element_H[None, :],
            other=0.0,
        )
        new = tl.maximum(top, tl.max(weight_S, 0))
        weight_S = tl.exp2(weight_S - new)
        decay = tl.exp2(top - new)
        total = total * decay + tl.sum(weight_S, 0)
        sum_H = sum_H * decay + tl.sum(sum_SH * weight_S[:, None], 0)
        top = new
    to_H = out + row.to(tl.int64) * out_stride + head * HEAD_DIM + at_H
    tl.store(to_H, (sum_H / total).to(out.dtype.element_ty), mask=is_element_H)
