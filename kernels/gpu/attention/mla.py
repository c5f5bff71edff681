"""Triton kernels of `attend_latents` and `extend_over_latents`, whose torch code specifies them.

All heads share one K, whose first part is also V: a block is read once and used in both products.
Rows are divided into splits as in `decode.py`, and runs of new tokens into tiles as in
`prefill.py`. Launches do not depend on device values.

Legend, and suffixes of blocks: D rows, T tokens, H heads, C elements of a latent, P rotary
elements; M queries, N keys, R rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.attention.decode import FIXED_SPLIT_TOKENS, FIXED_SPLITS
from remora.kernels.attention.split_plan import SplitPlan
from remora.kernels.gpu.arch import Arch, arch_of
from remora.kernels.gpu.attention.decode import (
    ITEM,
    MIN_SPLIT,
    ROUNDS,
    load_item,
    merge,
    plan_items,
)
from remora.kernels.gpu.attention.prefill import PrefillLaunch, find_tile, num_tiles
from remora.kernels.gpu.attention.steps import find_slots, row_block, score_factors, update_softmax


@dataclass(frozen=True, slots=True)
class LatentLaunch(PrefillLaunch):
    """Launch parameters of splits and tiles; sums of more than 32 queries exceed registers.

    programs:  programs that run concurrently on the GPU
    """

    programs: int


# Of five stages Triton uses two for page ids and two for latents.
LAUNCHES = {
    Arch.AMPERE: LatentLaunch(32, 32, 8, 5, 108),
    Arch.HOPPER: LatentLaunch(32, 32, 8, 5, 132 * 2),
    Arch.BLACKWELL: LatentLaunch(32, 32, 8, 5, 148 * 2),
    Arch.SMALL: LatentLaunch(32, 16, 8, 5, 84),
    Arch.CDNA: LatentLaunch(32, 16, 8, 2, 304),
}
WIDE = LatentLaunch(16, 16, 8, 2, 132)  # of 32-bit elements, which tensor cores do not multiply
MIN_QUERIES = 16  # of a tile: minimum of tl.dot


def plan(
    query: Tensor, pages: Tensor, tables: Tensor, lengths: Tensor, *, fixed_split: bool
) -> SplitPlan:
    """Divide rows into splits; arguments as in `attend_latents`."""
    num_rows, num_heads, _ = query.shape
    launch = launch_of(arch_of(query.device), query.itemsize)
    if fixed_split:
        most = triton.cdiv(tables.shape[1] * pages.shape[1], FIXED_SPLIT_TOKENS)
        splits = min(FIXED_SPLITS, most)
        num_items = num_rows * splits
    else:
        splits = max(1, launch.programs // triton.cdiv(num_heads, queries_of(launch, num_heads)))
        num_items = num_rows + splits * ROUNDS
    return plan_items(
        lengths,
        num_items,
        splits,
        window=None,
        fixed_split=fixed_split,
        min_split=FIXED_SPLIT_TOKENS if fixed_split else MIN_SPLIT,
        keys=launch.keys,
    )


def attend(
    query: Tensor, pages: Tensor, tables: Tensor, out: Tensor, *, scale: float, plan: SplitPlan
) -> None:
    """Attend each row to its pages; tensors as in `attend_latents`."""
    _, num_heads, size = query.shape
    latent_size, num_items = out.shape[2], len(plan.items)
    launch = launch_of(arch_of(query.device), query.itemsize)
    queries = queries_of(launch, num_heads)
    sums = query.new_empty((num_items, num_heads, latent_size), dtype=torch.float32)
    weights = query.new_empty((num_items, num_heads), dtype=torch.float32)
    latent_split_kernel[(triton.cdiv(num_heads, queries), num_items)](
        query,
        pages,
        tables,
        plan.items,
        out,
        sums,
        weights,
        score_factors(scale, None)[0],
        query.stride(0),
        tables.stride(0),
        out.stride(0),
        HEADS=num_heads,
        LATENT=latent_size,
        ROTATED=size - latent_size,
        PAGE=pages.shape[1],
        ITEM=ITEM,
        M=queries,
        N=launch.keys,
        C=triton.next_power_of_2(latent_size),
        P=max(16, triton.next_power_of_2(size - latent_size)),
        **launch.options(),
    )
    merge(sums, weights, plan.rows, out)


def queries_of(launch: LatentLaunch, num_heads: int) -> int:
    """Return the queries of a tile of a row's heads."""
    wanted: int = triton.next_power_of_2(num_heads)
    return min(launch.queries, max(MIN_QUERIES, wanted))


def extend(
    query: Tensor,
    pages: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    scale: float,
) -> None:
    """Attend each row's tokens to its pages; tensors as in `extend_over_latents`."""
    num_tokens, num_heads, size = query.shape
    latent_size, num_rows = out.shape[2], len(lengths)
    launch = launch_of(arch_of(query.device), query.itemsize)
    latent_extend_kernel[(num_tiles(num_rows, num_tokens, num_heads, launch.queries),)](
        query,
        pages,
        tables,
        starts,
        lengths,
        out,
        num_rows,
        score_factors(scale, None)[0],
        query.stride(0),
        tables.stride(0),
        out.stride(0),
        HEADS=num_heads,
        LATENT=latent_size,
        ROTATED=size - latent_size,
        PAGE=pages.shape[1],
        R=row_block(num_rows),
        M=launch.queries,
        N=launch.keys,
        C=triton.next_power_of_2(latent_size),
        P=max(16, triton.next_power_of_2(size - latent_size)),
        **launch.options(),
    )


def launch_of(arch: Arch, element_bytes: int) -> LatentLaunch:
    """Return the launch for an element size."""
    return WIDE if element_bytes == 4 else LAUNCHES[arch]


@triton.jit
def load_parts(
    memory: tl.tensor,
    from_M: tl.tensor,
    is_there_M: tl.tensor,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load query or key vectors: the latent part and the rotary part."""
    at_C, at_P = tl.arange(0, C), tl.arange(0, P)
    latent_MC = tl.load(
        memory + from_M[:, None] + at_C[None, :],
        mask=is_there_M[:, None] & (at_C < LATENT)[None, :],
        other=0.0,
    )
    rotated_MP = tl.load(
        memory + from_M[:, None] + LATENT + at_P[None, :],
        mask=is_there_M[:, None] & (at_P < ROTATED)[None, :],
        other=0.0,
    )
    return latent_MC, rotated_MP


@triton.jit
def attend_latent_block(
    query_MC: tl.tensor,
    query_MP: tl.tensor,
    pages: tl.tensor,
    slot_N: tl.tensor,
    is_key_N: tl.tensor,
    is_seen_MN: tl.tensor,
    factor: float,
    top_M: tl.tensor,
    total_M: tl.tensor,
    sum_MC: tl.tensor,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to a block of keys; return the new maximum, sum of weights and sum of latents."""
    from_N = slot_N * (LATENT + ROTATED)
    latent_NC, rotated_NP = load_parts(pages, from_N, is_key_N, LATENT, ROTATED, C, P)
    scores_MN = tl.dot(query_MP, tl.trans(rotated_NP), input_precision="ieee")
    scores_MN = tl.dot(query_MC, tl.trans(latent_NC), scores_MN, input_precision="ieee")
    scores_MN = tl.where(is_seen_MN, scores_MN * factor, float("-inf"))
    weights_MN, decay_M, top_M, total_M = update_softmax(scores_MN, top_M, total_M)
    sum_MC = tl.dot(
        weights_MN.to(latent_NC.dtype),
        latent_NC,
        sum_MC * decay_M[:, None],
        input_precision="ieee",
    )
    return top_M, total_M, sum_MC


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables"])
def latent_split_kernel(
    query: tl.tensor,
    pages: tl.tensor,
    tables: tl.tensor,
    items: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    weights: tl.tensor,
    factor: float,
    query_stride: int,
    table_stride: int,
    out_stride: int,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE: tl.constexpr,
    ITEM: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """Program (tile of heads, item); writes a row of one item to `out`."""
    item = tl.program_id(1)
    row, _, count, begin, end = load_item(items, item, ITEM)
    if row < 0:
        return
    head_M = tl.program_id(0) * M + tl.arange(0, M)
    is_head_M = head_M < HEADS
    from_M = row.to(tl.int64) * query_stride + head_M * (LATENT + ROTATED)
    query_MC, query_MP = load_parts(query, from_M, is_head_M, LATENT, ROTATED, C, P)
    table = tables + row.to(tl.int64) * table_stride
    top_M = tl.full([M], float("-inf"), tl.float32)
    total_M = tl.full([M], 0.0, tl.float32)
    sum_MC = tl.full([M, C], 0.0, tl.float32)
    for block in range(begin, end, N):
        slot_N, is_key_N = find_slots(table, block + tl.arange(0, N), end, PAGE)
        top_M, total_M, sum_MC = attend_latent_block(
            query_MC, query_MP, pages, slot_N, is_key_N, is_key_N[None, :], factor, top_M, total_M,
            sum_MC, LATENT, ROTATED, C, P,
        )  # fmt: skip
    # The sum of weights is 0 for a row without keys and at least 1 for others.
    sum_MC = sum_MC / tl.maximum(total_M, 1e-30)[:, None]
    at_C = tl.arange(0, C)
    at_MC = (head_M * LATENT)[:, None] + at_C[None, :]
    is_sum_MC = is_head_M[:, None] & (at_C < LATENT)[None, :]
    if count == 1:
        to_MC = out + row.to(tl.int64) * out_stride + at_MC
        tl.store(to_MC, sum_MC.to(out.dtype.element_ty), mask=is_sum_MC)
    else:
        to = item.to(tl.int64) * HEADS
        tl.store(sums + to * LATENT + at_MC, sum_MC, mask=is_sum_MC)
        tl.store(weights + to + head_M, top_M + tl.log2(total_M), mask=is_head_M)


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["tables", "starts", "lengths"],
)
def latent_extend_kernel(
    query: tl.tensor,
    pages: tl.tensor,
    tables: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    factor: float,
    query_stride: int,
    table_stride: int,
    out_stride: int,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """Program (tile of queries); the last tiles start first."""
    row, tile = find_tile(starts, tl.num_programs(0) - 1 - tl.program_id(0), num_rows, HEADS, R, M)
    if row >= num_rows:
        return
    stop, length = tl.load(starts + row + 1), tl.load(lengths + row)
    at_M = tile * M + tl.arange(0, M)
    token_M = tl.load(starts + row) + at_M // HEADS
    position_M = token_M - stop + length
    is_query_M = token_M < stop
    from_M = token_M.to(tl.int64) * query_stride + at_M % HEADS * (LATENT + ROTATED)
    query_MC, query_MP = load_parts(query, from_M, is_query_M, LATENT, ROTATED, C, P)
    table = tables + row.to(tl.int64) * table_stride
    top_M = tl.full([M], float("-inf"), tl.float32)
    total_M = tl.full([M], 0.0, tl.float32)
    sum_MC = tl.full([M, C], 0.0, tl.float32)
    end = tl.minimum(tl.max(position_M, 0) + 1, length)
    for block in range(0, end, N):
        at_N = block + tl.arange(0, N)
        slot_N, is_key_N = find_slots(table, at_N, end, PAGE)
        is_seen_MN = at_N[None, :] <= position_M[:, None]
        top_M, total_M, sum_MC = attend_latent_block(
            query_MC, query_MP, pages, slot_N, is_key_N, is_seen_MN, factor, top_M, total_M, sum_MC,
            LATENT, ROTATED, C, P,
        )  # fmt: skip
    sum_MC = sum_MC / tl.maximum(total_M, 1e-30)[:, None]
    at_C = tl.arange(0, C)
    to_M = token_M.to(tl.int64) * out_stride + at_M % HEADS * LATENT
    tl.store(
        out + to_M[:, None] + at_C[None, :],
        sum_MC.to(out.dtype.element_ty),
        mask=is_query_M[:, None] & (at_C < LATENT)[None, :],
    )
