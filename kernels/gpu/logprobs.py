"""Log-probabilities on a GPU: the kernels of `token_logprobs` in `kernels/sampling.py`.

Four launches: `summarise` and `compact` of `candidates.py`, each followed by one with a program
for a row. The K likeliest tokens are among those that reach the K-th greatest maximum of a block;
they are taken one after the other, for they are few. How many there are is no reason for triton to
make another kernel, which would take it seconds.

Legend, and suffixes of blocks: as in `candidates.py`; K of the top.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.candidates import (
    ROW_OPTIONS,
    compact,
    image,
    kth_of_blocks,
    load_candidates,
    num_segments,
    summarise,
    tile_shape,
)


def describe(
    logits: Tensor,
    token_ids: Tensor,
    *,
    logprobs: Tensor,
    ranks: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
) -> None:
    """Describe tokens and the likeliest ones.

    logits:        [R, V] float32, a row in one piece; not changed
    token_ids:     [R] int64
    logprobs:      [R] float32; like what follows overwritten
    ranks:         [R] int32
    top_ids:       [R, K] int64
    top_logprobs:  [R, K] float32
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    num_top = top_ids.shape[1]
    maxima, masses = summarise(logits, None)
    bounds, normalisers = torch.empty_like(logprobs), torch.empty_like(logprobs)
    normalise_kernel[(num_rows,)](
        maxima,
        masses,
        bounds,
        normalisers,
        maxima.shape[1],
        num_top,
        BLOCKS=triton.next_power_of_2(maxima.shape[1]),
        **ROW_OPTIONS,
    )
    offsets, counts, greater = compact(logits, None, bounds, token_ids)
    describe_kernel[(num_rows,)](
        logits,
        token_ids,
        bounds,
        normalisers,
        offsets,
        counts,
        greater,
        logprobs,
        ranks,
        top_ids,
        top_logprobs,
        num_segments(vocab_size),
        num_top,
        logits.stride(0),
        **tile_shape(logits),
        **ROW_OPTIONS,
    )


@triton.jit(do_not_specialize=["num_top"])
def normalise_kernel(
    maxima: tl.tensor,
    masses: tl.tensor,
    bounds: tl.tensor,
    normalisers: tl.tensor,
    num_blocks: int,
    num_top: int,
    BLOCKS: tl.constexpr,
) -> None:
    """Program (row): the logarithm of the sum of all exponentials, and the bound of the top."""
    row = tl.program_id(0).to(tl.int64)
    block_B = tl.arange(0, BLOCKS)
    at_B = row * num_blocks + block_B
    best_B = tl.load(maxima + at_B, mask=block_B < num_blocks, other=float("-inf"))
    best = tl.max(tl.where(best_B == best_B, best_B, float("-inf")), 0)
    share_B = tl.where(best_B > float("-inf"), tl.exp(best_B - best), 0.0)
    mass_B = tl.load(masses + at_B, mask=block_B < num_blocks, other=0.0) * share_B
    tl.store(normalisers + row, best + tl.log(tl.sum(mass_B, 0)))
    bound = best
    if num_top > 0:
        bound = kth_of_blocks(best_B, num_top, num_blocks)
    tl.store(bounds + row, bound)


@triton.jit(do_not_specialize=["num_top"])
def describe_kernel(
    logits: tl.tensor,
    token_ids: tl.tensor,
    bounds: tl.tensor,
    normalisers: tl.tensor,
    offsets: tl.tensor,
    counts: tl.tensor,
    greater: tl.tensor,
    logprobs: tl.tensor,
    ranks: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    num_segments: int,
    num_top: int,
    stride: int,
    S: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
) -> None:
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    offsets += row * num_segments * E
    segment_S = tl.arange(0, S)
    # Nothing was written of a row without a bound.
    is_segment_S = segment_S < tl.where(tl.load(bounds + row) < float("inf"), num_segments, 0)
    at_S = row * num_segments + segment_S
    count_S = tl.load(counts + at_S, mask=is_segment_S, other=0)
    greater_S = tl.load(greater + at_S, mask=is_segment_S, other=0)
    tl.store(ranks + row, tl.sum(greater_S, 0) + 1)
    normaliser = tl.load(normalisers + row)
    tl.store(logprobs + row, tl.load(logits + tl.load(token_ids + row)) - normaliser)
    # Each time the token that follows the one before: of the greatest logit below, the lowest id.
    heat = tl.full([], 1.0, tl.float32)
    last, last_id = tl.full([], 0x7FFFFFFF, tl.int32), tl.full([], -1, tl.int32)
    for place in range(num_top):
        best = tl.full([], -0x7FFFFFFF, tl.int32)
        best_id = tl.full([], 0x7FFFFFFF, tl.int32)
        for first in range(0, tl.max(count_S, 0), W):
            x_SW, id_SW = load_candidates(logits, offsets, count_S, heat, first, E, W)
            image_SW = image(x_SW)
            is_left_SW = (image_SW < last) | ((image_SW == last) & (id_SW > last_id))
            is_left_SW &= (first + tl.arange(0, W))[None, :] < count_S[:, None]
            here = tl.max(tl.max(tl.where(is_left_SW, image_SW, -0x7FFFFFFF), 1), 0)
            is_here_SW = is_left_SW & (image_SW == here)
            id_here = tl.min(tl.min(tl.where(is_here_SW, id_SW, 0x7FFFFFFF), 1), 0)
            # Segments go on in a later round: an equal logit may have a lower id there.
            id_here = tl.where(here == best, tl.minimum(id_here, best_id), id_here)
            best_id = tl.where(here >= best, id_here, best_id)
            best = tl.maximum(best, here)
        is_found = best_id < 0x7FFFFFFF
        x = tl.load(logits + best_id, mask=is_found, other=float("-inf"))
        tl.store(top_ids + row * num_top + place, tl.where(is_found, best_id, 0))
        tl.store(top_logprobs + row * num_top + place, x - normaliser)
        last, last_id = best, best_id
