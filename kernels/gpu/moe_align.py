"""Triton kernels that sort token-expert pairs by expert into blocks of one expert each.

Nothing waits for the device: memory has the largest possible size, and unused blocks are marked. No
atomics: a pair's place is the number of pairs before it, so it is reproducible. One program sorts
few pairs; many are sorted in chunks by three launches: count, prefix sums, place.

Legend, and suffixes of blocks: E experts (a power of two), P pairs, B blocks of rows, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_FEW = 1024  # most pairs that one program sorts
CHUNK = 1024  # pairs of a program otherwise
CELLS = 4096  # of a program's table of pairs x experts


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows in blocks, each of one expert.

    pairs:    [max_blocks * size] int32, pair (token * k + place) of a row; padding: num_pairs
    experts:  [max_blocks] int32; -1 = unused, its rows are not written
    """

    pairs: Tensor
    experts: Tensor
    size: int

    @property
    def num_rows(self) -> int:
        """Rows of all blocks."""
        return len(self.pairs)


def align(ids: Tensor, num_experts: int, first_expert: int, size: int) -> Blocks:
    """Sort pairs into blocks.

    ids:   [T, k] int32; only pairs of the experts from `first_expert` on are sorted
    size:  rows of a block, a power of two
    """
    pairs, device = ids.numel(), ids.device
    # An expert's last block may have a single row.
    most = min(pairs, (pairs + num_experts * (size - 1)) // size)
    blocks = Blocks(
        pairs=torch.empty(most * size, dtype=torch.int32, device=device),
        experts=torch.empty(most, dtype=torch.int32, device=device),
        size=size,
    )
    padded = triton.next_power_of_2(num_experts)
    options = {
        "E": padded,
        "P": max(16, CELLS // padded),
        "num_warps": 8,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }
    common = num_experts, first_expert, pairs
    if pairs <= MAX_FEW:
        align_few_kernel[(1,)](
            ids, blocks.pairs, blocks.experts, *common, most, SIZE=size, **options
        )
        return blocks
    chunks = triton.cdiv(pairs, CHUNK)
    counts = torch.empty((chunks, padded), dtype=torch.int32, device=device)
    firsts = torch.empty(padded, dtype=torch.int32, device=device)
    count_kernel[(chunks,)](ids, counts, *common, CHUNK=CHUNK, **options)
    add_up_kernel[(1,)](
        counts, firsts, blocks.pairs, blocks.experts, chunks, pairs, most, SIZE=size, **options
    )
    place_kernel[(chunks,)](ids, counts, firsts, blocks.pairs, *common, CHUNK=CHUNK, **options)
    return blocks


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def align_few_kernel(
    ids: tl.tensor,
    sorted_pairs: tl.tensor,
    block_experts: tl.tensor,
    num_experts: int,
    first_expert: int,
    num_pairs: int,
    max_blocks: int,
    SIZE: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """One program."""
    count_E = counted(ids, 0, num_pairs, first_expert, num_experts, E, P)
    first_E = lay_out(count_E, sorted_pairs, block_experts, num_pairs, max_blocks, SIZE, E, P)
    place(ids, sorted_pairs, first_E, 0, num_pairs, first_expert, num_experts, E, P)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    ids: tl.tensor,
    counts: tl.tensor,
    num_experts: int,
    first_expert: int,
    num_pairs: int,
    CHUNK: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """Program (chunk)."""
    begin = tl.program_id(0) * CHUNK
    end = tl.minimum(begin + CHUNK, num_pairs)
    count_E = counted(ids, begin, end, first_expert, num_experts, E, P)
    tl.store(counts + tl.program_id(0) * E + tl.arange(0, E), count_E)


@triton.jit(do_not_specialize=["num_chunks", "num_pairs", "max_blocks"])
def add_up_kernel(
    counts: tl.tensor,
    firsts: tl.tensor,
    sorted_pairs: tl.tensor,
    block_experts: tl.tensor,
    num_chunks: int,
    num_pairs: int,
    max_blocks: int,
    SIZE: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """One program: counts become prefix sums over chunks; experts get their first rows."""
    expert_E = tl.arange(0, E)
    total_E = tl.full([E], 0, tl.int32)
    for from_chunk in range(0, num_chunks, P):
        chunk_C = from_chunk + tl.arange(0, P)
        at_CE = counts + chunk_C[:, None] * E + expert_E[None, :]
        is_chunk_CE = (chunk_C < num_chunks)[:, None]
        count_CE = tl.load(at_CE, mask=is_chunk_CE, other=0)
        before_CE = tl.cumsum(count_CE, axis=0) - count_CE + total_E[None, :]
        tl.store(at_CE, before_CE, mask=is_chunk_CE)
        total_E += tl.sum(count_CE, axis=0)
    first_E = lay_out(total_E, sorted_pairs, block_experts, num_pairs, max_blocks, SIZE, E, P)
    tl.store(firsts + expert_E, first_E)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    ids: tl.tensor,
    counts: tl.tensor,
    firsts: tl.tensor,
    sorted_pairs: tl.tensor,
    num_experts: int,
    first_expert: int,
    num_pairs: int,
    CHUNK: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """Program (chunk)."""
    expert_E = tl.arange(0, E)
    begin = tl.program_id(0) * CHUNK
    end = tl.minimum(begin + CHUNK, num_pairs)
    next_E = tl.load(counts + tl.program_id(0) * E + expert_E) + tl.load(firsts + expert_E)
    place(ids, sorted_pairs, next_E, begin, end, first_expert, num_experts, E, P)


@triton.jit
def chosen(
    ids: tl.tensor,
    pair_P: tl.tensor,
    end: tl.tensor,
    first_expert: int,
    num_experts: int,
    E: tl.constexpr,
) -> tl.tensor:
    """Return a 0/1 table of pairs and their experts, for experts held here."""
    expert_P = tl.load(ids + pair_P, mask=pair_P < end, other=-1) - first_expert
    is_held_P = (pair_P < end) & (expert_P >= 0) & (expert_P < num_experts)
    return ((expert_P[:, None] == tl.arange(0, E)[None, :]) & is_held_P[:, None]).to(tl.int32)


@triton.jit
def counted(
    ids: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    first_expert: int,
    num_experts: int,
    E: tl.constexpr,
    P: tl.constexpr,
) -> tl.tensor:
    """Return the number of pairs of each expert."""
    count_E = tl.full([E], 0, tl.int32)
    for pair in range(begin, end, P):
        one_PE = chosen(ids, pair + tl.arange(0, P), end, first_expert, num_experts, E)
        count_E += tl.sum(one_PE, axis=0)
    return count_E


@triton.jit
def lay_out(
    count_E: tl.tensor,
    sorted_pairs: tl.tensor,
    block_experts: tl.tensor,
    num_pairs: int,
    max_blocks: int,
    SIZE: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
) -> tl.tensor:
    """Assign blocks to experts, pad their last blocks, and return the experts' first rows."""
    last_E = tl.cumsum((count_E + SIZE - 1) // SIZE, axis=0)
    first_E = (last_E - (count_E + SIZE - 1) // SIZE) * SIZE
    for place in range(SIZE - 1):
        row_E = first_E + count_E + place
        none_E = tl.full([E], 0, tl.int32) + num_pairs
        tl.store(sorted_pairs + row_E, none_E, mask=row_E < last_E * SIZE)
    for block in range(0, max_blocks, P):
        block_B = block + tl.arange(0, P)
        expert_B = tl.sum((last_E[None, :] <= block_B[:, None]).to(tl.int32), axis=1)
        expert_B = tl.where(expert_B < E, expert_B, -1)
        tl.store(block_experts + block_B, expert_B, mask=block_B < max_blocks)
    return first_E


@triton.jit
def place(
    ids: tl.tensor,
    sorted_pairs: tl.tensor,
    next_E: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    first_expert: int,
    num_experts: int,
    E: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """Write pairs to their experts' next rows, in order."""
    for pair in range(begin, end, P):
        pair_P = pair + tl.arange(0, P)
        one_PE = chosen(ids, pair_P, end, first_expert, num_experts, E)
        row_PE = next_E[None, :] + tl.cumsum(one_PE, axis=0) - one_PE
        row_P = tl.sum(row_PE * one_PE, axis=1)
        tl.store(sorted_pairs + row_P, pair_P, mask=tl.sum(one_PE, axis=1) > 0)
        next_E += tl.sum(one_PE, axis=0)
