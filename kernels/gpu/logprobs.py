"""Triton kernels of `token_logprobs` in `kernels/sampling.py`, which specifies it.

Four launches: `summarise` and `compact` of `candidates.py`, each followed by one with a program
per row. The K likeliest tokens reach the K-th greatest block maximum; they are few, so they are
selected one after the other. K is not specialised: compilation would take seconds.

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


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what `token_logprobs_on_device` does; `num_top` is at most V."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
    top_ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=device)
    top_logprobs = torch.empty((num_rows, num_top), dtype=torch.float32, device=device)
    if num_rows == 0:
        return logprobs, ranks, top_ids, top_logprobs
    blocks = summarise(logits)
    maxima, masses = blocks.maxima, blocks.masses
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
    return logprobs, ranks, top_ids, top_logprobs


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
    """Program (row): computes the row's log-sum-exp and the bound of its top tokens."""
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
    # `compact` writes nothing for a row without a finite bound.
    is_segment_S = segment_S < tl.where(tl.load(bounds + row) < float("inf"), num_segments, 0)
    at_S = row * num_segments + segment_S
    count_S = tl.load(counts + at_S, mask=is_segment_S, other=0)
    greater_S = tl.load(greater + at_S, mask=is_segment_S, other=0)
    tl.store(ranks + row, tl.sum(greater_S, 0) + 1)
    normaliser = tl.load(normalisers + row)
    tl.store(logprobs + row, tl.load(logits + tl.load(token_ids + row)) - normaliser)
    # Each iteration selects the next token: the greatest logit left, the lowest id among equals.
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
            # Later rounds continue the segments, so an equal logit may have a lower id there.
            id_here = tl.where(here == best, tl.minimum(id_here, best_id), id_here)
            best_id = tl.where(here >= best, id_here, best_id)
            best = tl.maximum(best, here)
        is_found = best_id < 0x7FFFFFFF
        x = tl.load(logits + best_id, mask=is_found, other=float("-inf"))
        tl.store(top_ids + row * num_top + place, tl.where(is_found, best_id, 0))
        tl.store(top_logprobs + row * num_top + place, x - normaliser)
        last, last_id = best, best_id
