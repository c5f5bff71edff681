"""Triton kernels that reduce rows of logits to the candidates of sampling and log-probabilities.

A row is divided into segments, one program each, so that even a single row fills the GPU. The
division depends only on the vocabulary: a row's bits do not depend on other rows.

`summarise` reads a row once and yields facts of each block. The caller derives a
bound from them, and `compact` collects the tokens that reach it: usually a few of each segment,
which one program holds in registers and bisects. The bisection runs over integers in the order of
the floats and jumps to values that occur, so it takes at most 32 steps. Flat rows with a wide
filter leave many candidates, which each step then reads in a loop.

Legend, and suffixes of blocks: R rows, V vocabulary, S segments (the next power of two in a
program), B blocks of a segment, E elements of a block or a segment; W candidates of a segment that
are read together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.arch import Arch, arch_of

BLOCK, SEGMENT = 128, 2048
# Candidates of all segments that a program holds: 4 per thread, because of register pressure.
TILES = {arch: 1024 if arch is Arch.SMALL else 2048 for arch in Arch}
SEGMENT_OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
ROW_OPTIONS: dict[str, Any] = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": True}
TILE_OPTIONS: dict[str, Any] = {"num_warps": 16, "num_stages": 1, "enable_fp_fusion": True}


def tile_shape(logits: Tensor) -> dict[str, int]:
    """Return the sizes of tiles of candidates for rows of logits [R, V]."""
    padded = triton.next_power_of_2(num_segments(logits.shape[1]))
    return {"S": padded, "W": max(8, TILES[arch_of(logits.device)] // padded), "E": SEGMENT}


def num_segments(vocab_size: int) -> int:
    """Return the number of segments of a row."""
    return -(-vocab_size // SEGMENT)


@dataclass(frozen=True, slots=True)
class Summaries:
    """Facts of each block [R, S * SEGMENT / BLOCK].

    maxima:   float32 greatest logit; NaN if the block holds one
    masses:   float32 sum of exp((logit - greatest) / temperature)
    times:    float32 least time in the race (`kernels/sampling.py`), as if the greatest weighed 1
    winners:  int32 offset of the token that has it
    """

    maxima: Tensor
    masses: Tensor
    times: Tensor
    winners: Tensor


def summarise(
    logits: Tensor, temperature: Tensor | None = None, keys: Tensor | None = None
) -> Summaries:
    """Summarise the blocks of rows.

    logits:       [R, V] float32, each row contiguous
    temperature:  [R] float32; only maxima where it is 0, nothing where it is below 0; None = 1
    keys:         [R] int64 of the races; None = times and winners are not written
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    segments = num_segments(vocab_size)
    shape = num_rows, segments * (SEGMENT // BLOCK)
    maxima, masses, times = (
        torch.empty(shape, dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    winners = torch.empty(shape, dtype=torch.int32, device=logits.device)
    if num_rows > 0:
        summarise_kernel[(num_rows, segments)](
            logits,
            logits if temperature is None else temperature,
            logits if keys is None else keys,
            maxima,
            masses,
            times,
            winners,
            vocab_size,
            logits.stride(0),
            HAS_TEMPERATURE=temperature is not None,
            HAS_KEYS=keys is not None,
            BLOCKS=SEGMENT // BLOCK,
            BLOCK=BLOCK,
            **SEGMENT_OPTIONS,
        )
    return Summaries(maxima, masses, times, winners)


def compact(
    logits: Tensor, temperature: Tensor | None, bounds: Tensor, chosen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Collect the tokens whose scaled logits reach their row's bound, in the order of ids.

    logits, temperature:  as in `summarise`; -inf is never a candidate
    bounds:               [R] float32; infinity = skip the row and write nothing
    chosen:               [R] int64 ids of tokens to rank; None = no ranking

    Returns the candidates' offsets in their segments [R, S * SEGMENT] int16 (unused entries are not
    written), the number of candidates of each segment [R, S] int32, and the number of logits of
    each segment greater than the chosen token's [R, S] int32 (not written without `chosen`).
    """
    num_rows, vocab_size = logits.shape
    segments = num_segments(vocab_size)
    device = logits.device
    offsets = torch.empty((num_rows, segments * SEGMENT), dtype=torch.int16, device=device)
    counts = torch.empty((num_rows, segments), dtype=torch.int32, device=device)
    greater = torch.empty_like(counts)
    if num_rows > 0:
        compact_kernel[(num_rows, segments)](
            logits,
            logits if temperature is None else temperature,
            bounds,
            logits if chosen is None else chosen,
            offsets,
            counts,
            greater,
            vocab_size,
            logits.stride(0),
            HAS_TEMPERATURE=temperature is not None,
            HAS_CHOSEN=chosen is not None,
            E=SEGMENT,
            **SEGMENT_OPTIONS,
        )
    return offsets, counts, greater


@triton.jit
def summarise_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    keys: tl.tensor,
    maxima: tl.tensor,
    masses: tl.tensor,
    times: tl.tensor,
    winners: tl.tensor,
    vocab_size: int,
    stride: int,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (row, segment)."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row) if HAS_TEMPERATURE else 1.0
    if heat < 0:
        return
    block_B = segment * BLOCKS + tl.arange(0, BLOCKS)
    id_BE = block_B[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x_BE = tl.load(logits + row * stride + id_BE, mask=id_BE < vocab_size, other=float("-inf"))
    is_nan_BE = x_BE != x_BE
    is_nan_B = tl.max(is_nan_BE.to(tl.int32), 1) > 0
    best_B = tl.max(tl.where(is_nan_BE, float("-inf"), x_BE), 1)
    at_B = row * tl.num_programs(1) * BLOCKS + block_B
    tl.store(maxima + at_B, tl.where(is_nan_B, float("nan"), best_B))
    if heat > 0:
        top_B = tl.div_rn(best_B, heat)
        distance_BE = tl.div_rn(x_BE, heat) - top_B[:, None]
        weight_BE = tl.where(x_BE > float("-inf"), tl.exp(distance_BE), 0.0)
        tl.store(masses + at_B, tl.sum(weight_BE, 1))
        if HAS_KEYS:
            number_BE = exponentials(tl.load(keys + row), id_BE)
            time_BE = tl.where(weight_BE > 0, number_BE / weight_BE, float("inf"))
            time_B = tl.min(time_BE, 1)
            place_BE = tl.arange(0, BLOCK)[None, :]
            place_BE = tl.where(time_BE == time_B[:, None], place_BE, BLOCK - 1)
            tl.store(times + at_B, time_B)
            tl.store(winners + at_B, tl.min(place_BE, 1))


@triton.jit
def compact_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    bounds: tl.tensor,
    chosen: tl.tensor,
    offsets: tl.tensor,
    counts: tl.tensor,
    greater: tl.tensor,
    vocab_size: int,
    stride: int,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_CHOSEN: tl.constexpr,
    E: tl.constexpr,
) -> None:
    """Program (row, segment)."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bound = tl.load(bounds + row)
    if bound == float("inf"):
        return
    place_E = tl.arange(0, E)
    id_E = segment * E + place_E
    x_E = tl.load(logits + row * stride + id_E, mask=id_E < vocab_size, other=float("-inf"))
    at = row * tl.num_programs(1) + segment
    if HAS_CHOSEN:
        own = tl.load(logits + row * stride + tl.load(chosen + row))
        tl.store(greater + at, tl.sum((x_E > own).to(tl.int32), 0))
    heat = tl.load(temperature + row) if HAS_TEMPERATURE else 1.0
    scaled_E = tl.div_rn(x_E, heat)
    is_kept_E = (scaled_E >= bound) & (x_E > float("-inf"))
    to_E = tl.cumsum(is_kept_E.to(tl.int32), 0) - 1
    tl.store(offsets + at * E + to_E, place_E.to(tl.int16), mask=is_kept_E)
    tl.store(counts + at, tl.sum(is_kept_E.to(tl.int32), 0))


@triton.jit
def load_candidates(
    logits: tl.tensor,
    offsets: tl.tensor,
    count_S: tl.tensor,
    heat: tl.tensor,
    first: int,
    E: tl.constexpr,
    W: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return scaled logits [S, W] and ids of segments' candidates from `first` on, padded by -inf.

    logits, offsets:  pointers to the row
    """
    segment_S = tl.arange(0, count_S.shape[0])
    place_W = first + tl.arange(0, W)
    is_here_SW = place_W[None, :] < count_S[:, None]
    at_SW = segment_S[:, None] * E + place_W[None, :]
    offset_SW = tl.load(offsets + at_SW, mask=is_here_SW, other=0).to(tl.int32)
    id_SW = segment_S[:, None] * E + offset_SW
    x_SW = tl.load(logits + id_SW, mask=is_here_SW, other=float("-inf"))
    return tl.div_rn(x_SW, heat), id_SW


@triton.jit
def exponentials(key: tl.tensor, id: tl.tensor) -> tl.tensor:
    """Return an exponentially distributed number for each id; see `kernels/sampling.py`."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = _mix32(_mix32(id.to(tl.uint32) * 0x9E3779B1 + low) ^ high)
    fraction = ((bits >> 1).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 2**31)
    fraction = tl.minimum(fraction, 1 - 1.0 / 2**24)
    # -log(1 - f). The device's logarithm has an absolute error, so small fractions take the series.
    series = 1.0 / 6
    for power in tl.static_range(5, 0, -1):
        series = series * fraction + 1.0 / power
    return tl.where(fraction < 1 / 16, series * fraction, -tl.log(1 - fraction))


@triton.jit
def _mix32(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def image(x: tl.tensor) -> tl.tensor:
    """Return integers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(image: tl.tensor) -> tl.tensor:
    """Return the float of an image."""
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def midway(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return the middle of two integers, rounded up, whatever their difference."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def amounts_from(
    scaled_SW: tl.tensor, mid: tl.tensor, top: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the number and the mass [] of candidates whose images reach `mid`.

    Also returns the least image that does, and the greatest that does not.
    """
    image_SW = image(scaled_SW)
    is_above_SW = image_SW >= mid
    count = tl.sum(tl.sum(is_above_SW.to(tl.int32), 1), 0)
    weight_SW = tl.where(is_above_SW, tl.exp(scaled_SW - top), 0.0)
    mass = tl.sum(tl.sum(weight_SW, 1).to(tl.float64), 0)
    above = tl.min(tl.min(tl.where(is_above_SW, image_SW, 0x7FFFFFFF), 1), 0)
    below = tl.max(tl.max(tl.where(is_above_SW, -0x7FFFFFFF, image_SW), 1), 0)
    return count, mass, above, below


@triton.jit
def kth_of_blocks(top_B: tl.tensor, count: tl.tensor, num_blocks: int) -> tl.tensor:
    """Return the `count`-th greatest of blocks' maxima; -inf where there are fewer blocks."""
    image_B = image(top_B)
    low, high = image(tl.full([], float("-inf"), tl.float32)), tl.max(image_B, 0)
    if count <= num_blocks:
        while low < high:
            mid = midway(low, high)
            is_above_B = image_B >= mid
            if tl.sum(is_above_B.to(tl.int32), 0) >= count:
                low = tl.min(tl.where(is_above_B, image_B, 0x7FFFFFFF), 0)
            else:
                high = tl.max(tl.where(is_above_B, -0x7FFFFFFF, image_B), 0)
    return float_of(low)
