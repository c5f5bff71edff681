"""Triton kernels of `choose` in `kernels/sampling.py`, which specifies it.

Four launches for any mix of rows, without reading anything back:
1. `summarise` reads the logits once, and lets the tokens of each block race.
2. `bound_kernel`, one program per row, finishes greedy rows, and rows without filters by a race of
   the blocks' winners; for other rows it derives a bound of the candidates from the row's blocks.
3. `compact` collects the candidates of the unfinished rows.
4. `draw_kernel`, one program per row, bisects the candidates for the threshold of all filters and
   lets those at or above it race.

A bound is at or below the threshold: for top-k the k-th greatest block maximum; for top-p the
logit at which (1 - p) of the mass would be spread equally over all tokens, since tokens below it
hold less; for min-p the threshold itself.

Legend, and suffixes of blocks: as in `candidates.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels import sampling
from remora.kernels.gpu.candidates import (
    BLOCK,
    ROW_OPTIONS,
    TILE_OPTIONS,
    amounts_from,
    compact,
    exponentials,
    float_of,
    image,
    kth_of_blocks,
    load_candidates,
    midway,
    num_segments,
    summarise,
    tile_shape,
)

NO_FAULT = tl.constexpr(sampling.NO_FAULT)
NOT_FINITE = tl.constexpr(sampling.NOT_FINITE)
ALL_BANNED = tl.constexpr(sampling.ALL_BANNED)


def choose(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """Do what `choose_on_device` does; logits are not changed."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    chosen = torch.empty((2, num_rows), dtype=torch.int64, device=device)
    if num_rows == 0:
        return chosen
    blocks = summarise(logits, temperature, keys)
    bests = torch.empty(num_rows, dtype=torch.float32, device=device)
    totals = torch.empty(num_rows, dtype=torch.float64, device=device)
    bounds = torch.empty(num_rows, dtype=torch.float32, device=device)
    rows = (logits, temperature, top_k, top_p, min_p)
    bound_kernel[(num_rows,)](
        *rows,
        blocks.maxima,
        blocks.masses,
        blocks.times,
        blocks.winners,
        chosen,
        bests,
        totals,
        bounds,
        vocab_size,
        blocks.maxima.shape[1],
        logits.stride(0),
        BLOCKS=triton.next_power_of_2(blocks.maxima.shape[1]),
        E=BLOCK,
        **ROW_OPTIONS,
    )
    offsets, counts, _ = compact(logits, temperature, bounds, None)
    draw_kernel[(num_rows,)](
        *rows,
        keys,
        bests,
        totals,
        bounds,
        offsets,
        counts,
        chosen,
        num_segments(vocab_size),
        logits.stride(0),
        **tile_shape(logits),
        **TILE_OPTIONS,
    )
    return chosen


@triton.jit
def bound_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    maxima: tl.tensor,
    masses: tl.tensor,
    times: tl.tensor,
    winners: tl.tensor,
    ids: tl.tensor,
    bests: tl.tensor,
    totals: tl.tensor,
    bounds: tl.tensor,
    vocab_size: int,
    num_blocks: int,
    stride: int,
    BLOCKS: tl.constexpr,
    E: tl.constexpr,
) -> None:
    """Program (row). An infinite bound marks a finished row.

    ids:  of all rows, followed by their faults
    """
    row = tl.program_id(0).to(tl.int64)
    faults = ids + tl.num_programs(0)
    heat = tl.load(temperature + row)
    if heat < 0:
        tl.store(ids + row, 0)
        tl.store(faults + row, 0)
        tl.store(bounds + row, float("inf"))
        return
    logits += row * stride
    block_B = tl.arange(0, BLOCKS)
    at_B = row * num_blocks + block_B
    is_block_B = block_B < num_blocks
    best_B = tl.load(maxima + at_B, mask=is_block_B, other=float("-inf"))
    best, fault = _best_of(best_B)
    tl.store(faults + row, fault)
    id_E = tl.min(tl.where(best_B == best, block_B, BLOCKS - 1), 0) * E + tl.arange(0, E)
    x_E = tl.load(logits + id_E, mask=id_E < vocab_size, other=float("-inf"))
    # Stay within the vocabulary even for rows without a maximum (NaN).
    chosen = tl.minimum(tl.min(tl.where(x_E == best, id_E, vocab_size), 0), vocab_size - 1)
    bound = tl.full([], float("inf"), tl.float32)
    top = tl.div_rn(best, heat)
    # A temperature so low that scaled logits overflow counts as greedy.
    if (fault == NO_FAULT) & (heat > 0) & (top < float("inf")):
        top_B = tl.div_rn(best_B, heat)
        share_B = tl.where(best_B > float("-inf"), tl.exp(top_B - top), 0.0)
        mass_B = tl.load(masses + at_B, mask=is_block_B, other=0.0).to(tl.float64) * share_B
        total = tl.sum(mass_B, 0)
        count, nucleus, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        if (count <= 0) & (nucleus >= 1) & (least <= 0):
            time_B = tl.load(times + at_B, mask=is_block_B, other=float("inf"))
            block = _winner(time_B, share_B)
            chosen = block * E + tl.load(winners + row * num_blocks + block)
        else:
            bound = top + tl.log(least)
            if count > 0:
                of_k = kth_of_blocks(top_B, count, num_blocks)
                # With both filters, top-p counts the mass of all tokens that top-k keeps.
                bound = tl.where(nucleus < 1, of_k, tl.maximum(bound, of_k))
            elif nucleus < 1:
                share = ((1 - nucleus) * total / vocab_size).to(tl.float32)
                # The margin exceeds the rounding error of sums.
                bound = tl.maximum(bound, top + tl.log(share) - 0.01)
            tl.store(bests + row, best)
            tl.store(totals + row, total)
    tl.store(ids + row, chosen)
    tl.store(bounds + row, bound)


@triton.jit
def _best_of(best_B: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return a row's greatest logit, NaN aside, and its fault."""
    is_nan_B = best_B != best_B
    best = tl.max(tl.where(is_nan_B, float("-inf"), best_B), 0)
    fault = tl.where(best < float("inf"), NO_FAULT, NOT_FINITE)
    fault = tl.where(best > float("-inf"), fault, ALL_BANNED)
    return best, tl.where(tl.max(is_nan_B.to(tl.int32), 0) > 0, NOT_FINITE, fault)


@triton.jit
def _winner(time_B: tl.tensor, share_B: tl.tensor) -> tl.tensor:
    """Return the first block with the least time [] for its share of the greatest weight."""
    time_B = tl.where(share_B > 0, time_B / share_B, float("inf"))
    block_B = tl.arange(0, time_B.shape[0])
    return tl.min(tl.where(time_B == tl.min(time_B, 0), block_B, time_B.shape[0] - 1), 0)


@triton.jit
def draw_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    keys: tl.tensor,
    bests: tl.tensor,
    totals: tl.tensor,
    bounds: tl.tensor,
    offsets: tl.tensor,
    counts: tl.tensor,
    ids: tl.tensor,
    num_segments: int,
    stride: int,
    S: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
) -> None:
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    bound = tl.load(bounds + row)
    if bound == float("inf"):
        return
    logits += row * stride
    offsets += row * num_segments * E
    counts += row * num_segments
    segment_S = tl.arange(0, S)
    count_S = tl.load(counts + segment_S, mask=segment_S < num_segments, other=0)
    most = tl.max(count_S, 0)
    heat = tl.load(temperature + row)
    top = tl.div_rn(tl.load(bests + row), heat)
    first_SW = load_candidates(logits, offsets, count_S, heat, 0, E, W)[0]
    low, total = image(bound), tl.load(totals + row)
    count, nucleus = tl.load(top_k + row), tl.load(top_p + row)
    # Find the greatest image at or above which enough candidates lie, for top-k, then for top-p.
    for search in range(2):
        is_count = search == 0
        is_on = (is_count & (count > 0)) | ((not is_count) & (nucleus < 1))
        first_mid, mid, high = low, low, image(top)
        kept = total
        while is_on:
            number, mass, above, below = amounts_from(first_SW, mid, top)
            for first in range(W, most, W):
                scaled_SW = load_candidates(logits, offsets, count_S, heat, first, E, W)[0]
                more, weight, least, greatest = amounts_from(scaled_SW, mid, top)
                number, mass = number + more, mass + weight
                above, below = tl.minimum(above, least), tl.maximum(below, greatest)
            is_enough = tl.where(is_count, number >= count, mass >= nucleus * total)
            # If even all candidates are not enough, keep them all.
            if is_enough | (mid == first_mid):
                low, kept = above, mass
            else:
                high = below
            mid = midway(low, high)
            is_on = low < high
        total = kept
    threshold = tl.maximum(float_of(low), top + tl.log(tl.load(min_p + row)))
    key = tl.load(keys + row)
    least, chosen = tl.full([], float("inf"), tl.float32), tl.full([], 0, tl.int32)
    for first in range(0, most, W):
        scaled_SW, id_SW = load_candidates(logits, offsets, count_S, heat, first, E, W)
        time, winner = _race(scaled_SW, id_SW, key, top, threshold)
        is_sooner = (time < least) | ((time == least) & (winner < chosen))
        chosen = tl.where(is_sooner, winner, chosen)
        least = tl.minimum(least, time)
    tl.store(ids + row, chosen)


@triton.jit
def _race(
    scaled_SW: tl.tensor, id_SW: tl.tensor, key: tl.tensor, top: tl.tensor, threshold: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the least time [] of candidates at or above the threshold, and whose it is."""
    weight_SW = tl.where(scaled_SW >= threshold, tl.exp(scaled_SW - top), 0.0)
    time_SW = tl.where(weight_SW > 0, exponentials(key, id_SW) / weight_SW, float("inf"))
    time = tl.min(tl.min(time_SW, 1), 0)
    first = tl.min(tl.min(tl.where(time_SW == time, id_SW, 0x7FFFFFFF), 1), 0)
    return time, first
