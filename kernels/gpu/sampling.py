"""Triton kernels of `choose` in `kernels/sampling.py`, which specifies it.

Four launches for any mix of rows, without reading anything back:
1. `summarise` reads the logits once.
2. `bound_kernel`, one program per row, finishes greedy rows and draws from all tokens; for other
   rows it derives a bound of the candidates from the row's blocks.
3. `compact` collects the candidates of the unfinished rows.
4. `draw_kernel`, one program per row, bisects the candidates for the threshold of all filters and
   draws one at or above it, in the order of ids.

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
    float_of,
    image,
    kth_of_blocks,
    load_candidates,
    midway,
    num_segments,
    pick,
    summarise,
    tile_shape,
)

NO_FAULT = tl.constexpr(sampling.NO_FAULT)
NOT_FINITE = tl.constexpr(sampling.NOT_FINITE)
ALL_BANNED = tl.constexpr(sampling.ALL_BANNED)


def choose(
    logits: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
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
    maxima, masses = summarise(logits, temperature)
    bests = torch.empty(num_rows, dtype=torch.float32, device=device)
    totals = torch.empty(num_rows, dtype=torch.float64, device=device)
    bounds = torch.empty(num_rows, dtype=torch.float32, device=device)
    rows = (logits, temperature, uniforms, top_k, top_p, min_p)
    bound_kernel[(num_rows,)](
        *rows,
        maxima,
        masses,
        chosen,
        bests,
        totals,
        bounds,
        vocab_size,
        maxima.shape[1],
        logits.stride(0),
        BLOCKS=triton.next_power_of_2(maxima.shape[1]),
        E=BLOCK,
        **ROW_OPTIONS,
    )
    offsets, counts, _ = compact(logits, temperature, bounds, None)
    draw_kernel[(num_rows,)](
        *rows,
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
    uniforms: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    maxima: tl.tensor,
    masses: tl.tensor,
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
    block = tl.min(tl.where(best_B == best, block_B, BLOCKS - 1), 0)
    id_E = block * E + tl.arange(0, E)
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
            chosen = _draw_from_blocks(logits, mass_B, tl.load(uniforms + row), heat, vocab_size, E)
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
def _draw_from_blocks(
    logits: tl.tensor,
    mass_B: tl.tensor,
    uniform: tl.tensor,
    heat: tl.tensor,
    vocab_size: int,
    E: tl.constexpr,
) -> tl.tensor:
    """Draw an id from a whole row: first the block, then the place in the block."""
    block, fraction = pick(mass_B, uniform)
    id_E = block * E + tl.arange(0, E)
    x_E = tl.load(logits + id_E, mask=id_E < vocab_size, other=float("-inf"))
    scaled_E = tl.div_rn(x_E, heat)
    # Relative to the block's maximum: relative to the row's, all weights may underflow.
    weight_E = tl.exp(scaled_E - tl.max(scaled_E, 0))
    return block * E + pick(weight_E, fraction)[0]


@triton.jit
def draw_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    uniforms: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
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
    mass_S = _masses(first_SW, top, threshold)
    for first in range(W, most, W):
        scaled_SW = load_candidates(logits, offsets, count_S, heat, first, E, W)[0]
        mass_S += _masses(scaled_SW, top, threshold)
    segment, fraction = pick(mass_S, tl.load(uniforms + row))
    offsets += segment * E
    chosen = _draw_from_segment(
        logits + segment * E, offsets, tl.load(counts + segment), fraction, heat, top, threshold, E
    )
    tl.store(ids + row, segment * E + chosen)


@triton.jit
def _draw_from_segment(
    logits: tl.tensor,
    offsets: tl.tensor,
    count: tl.tensor,
    fraction: tl.tensor,
    heat: tl.tensor,
    top: tl.tensor,
    threshold: tl.tensor,
    E: tl.constexpr,
) -> tl.tensor:
    """Draw one of a segment's candidates; `logits` and `offsets` point to the segment."""
    place_E = tl.arange(0, E)
    offset_E = tl.load(offsets + place_E, mask=place_E < count, other=0).to(tl.int32)
    x_E = tl.load(logits + offset_E, mask=place_E < count, other=float("-inf"))
    scaled_E = tl.div_rn(x_E, heat)
    weight_E = tl.where(scaled_E >= threshold, tl.exp(scaled_E - top), 0.0)
    index = pick(weight_E, fraction)[0]
    return tl.sum(tl.where(place_E == index, offset_E, 0), 0)


@triton.jit
def _masses(scaled_SW: tl.tensor, top: tl.tensor, threshold: tl.tensor) -> tl.tensor:
    weight_SW = tl.where(scaled_SW >= threshold, tl.exp(scaled_SW - top), 0.0)
    return tl.sum(weight_SW, 1).to(tl.float64)
