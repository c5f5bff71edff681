"""What kernels of attention over pages have in common: one block of keys, and whose turn it is.

Softmax goes over the keys once, block by block, and keeps a running maximum and sum (Milakov and
Gimelshein, arXiv:1805.02867); scores are in units of log 2, so that exp2 does for exp. Knows one
K/V head; knows nothing of how a row's keys are divided between programs.

Legend, and suffixes of blocks: R rows of a step, M queries, N keys, H elements of a head, padded to
a power of two.

What differs from step to step (rows, where their tables lie, how long those are) is no reason for
triton to make another kernel, which would take it seconds: it is told so where kernels begin.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.arch import Arch, arch_of

LOG2_E = math.log2(math.e)
# What weights and V are multiplied as, by the format of queries. V of 8 bits is exact in bfloat16,
# and weights times scales, which may be small, stay normal numbers there.
FACTORS = {
    torch.float32: (tl.float32, tl.float32),
    torch.float16: (tl.float16, tl.bfloat16),
    torch.bfloat16: (tl.bfloat16, tl.bfloat16),
}


def factor_of(query: Tensor, pages: Tensor) -> Any:
    """Return the format that weights and V are multiplied in.

    Raises ValueError for pages that this make of GPU cannot convert.
    """
    if pages.dtype is torch.float8_e4m3fn and not _converts_e4m3(pages.device):
        raise ValueError(
            "this GPU does not convert float8_e4m3fn; keep K and V in float8_e5m2, in int8 or in "
            f"{query.dtype}"
        )
    return FACTORS[query.dtype][pages.itemsize == 1]


def _converts_e4m3(device: torch.device) -> bool:
    arch = arch_of(device)
    if arch is Arch.SMALL and device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 9)
    return arch not in (Arch.AMPERE, Arch.CDNA)


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float | None]:
    """Return what products are multiplied by before and after the cap, if there is one.

    With x = q.k * scale, cap * tanh(x / cap) is cap * (1 - 2 / (1 + exp(2 x / cap))).
    """
    if soft_cap is None:
        return scale * LOG2_E, None
    return 2 * LOG2_E * scale / soft_cap, soft_cap * LOG2_E


def row_block(num_rows: int) -> int:
    """Return how long a vector of rows is: of few lengths, for each is a kernel of its own."""
    block = 16
    while block < num_rows:
        block *= 4
    return block


@triton.jit
def find_row(counts_R: tl.tensor, item: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the row to which an item belongs, and the row's first item.

    counts_R:  items of each row; items are numbered row after row
    """
    is_before_R = tl.cumsum(counts_R, 0) <= item
    row = tl.sum(is_before_R.to(tl.int32), 0)
    return row, tl.sum(tl.where(is_before_R, counts_R, 0), 0)


@triton.jit
def find_slots(
    table: tl.tensor, at_N: tl.tensor, end: tl.tensor, PAGE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the slots of positions, and which of them lie before the end: others are slot 0."""
    is_key_N = at_N < end
    page_N = tl.load(table + at_N // PAGE, mask=is_key_N, other=0)
    return page_N.to(tl.int64) * PAGE + at_N % PAGE, is_key_N


@triton.jit
def begin_softmax(
    sinks: tl.tensor,
    head_M: tl.tensor,
    is_head_M: tl.tensor,
    has_sink: tl.tensor,
    M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the maximum and the sum of weights of queries that have seen no key yet.

    sinks:     of the heads, or None = there are none
    has_sink:  whether this program counts them; of those that share a row's keys one does
    """
    top_M = tl.full([M], float("-inf"), tl.float32)
    total_M = tl.full([M], 0.0, tl.float32)
    if sinks is not None:
        sink_M = tl.load(sinks + head_M, mask=is_head_M, other=float("-inf"))
        sink_M = tl.where(has_sink, sink_M, float("-inf"))
        top_M = sink_M * 1.4426950408889634  # to units of log 2
        total_M = tl.where(sink_M == float("-inf"), 0.0, 1.0)
    return top_M, total_M


@triton.jit
def as_scores(products_MN: tl.tensor, inner: float, outer: float | None) -> tl.tensor:
    """Scale products of queries and keys, and cap them; see `score_factors`."""
    scores_MN = products_MN * inner
    if outer is not None:
        scores_MN = outer * (1.0 - 2.0 / (1.0 + tl.exp2(scores_MN)))
    return scores_MN


@triton.jit
def update_softmax(
    scores_MN: tl.tensor, top_M: tl.tensor, total_M: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Turn scores, -inf where a query does not look, into weights.

    Returns them, what was summed before is to be multiplied by, the new maximum and the new sum.
    A query that has seen no key yet has the maximum -inf, and weights of 0.
    """
    new_M = tl.maximum(top_M, tl.max(scores_MN, 1))
    base_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    weights_MN = tl.exp2(scores_MN - base_M[:, None])
    decay_M = tl.exp2(top_M - base_M)
    return weights_MN, decay_M, new_M, total_M * decay_M + tl.sum(weights_MN, 1)


@triton.jit
def attend_block(
    query_MH: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    slot_N: tl.tensor,
    is_key_N: tl.tensor,
    is_seen_MN: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.tensor,
    inner: float,
    outer: float | None,
    top_M: tl.tensor,
    total_M: tl.tensor,
    sum_MH: tl.tensor,
    HEAD_DIM: tl.constexpr,
    H: tl.constexpr,
    MASKED: tl.constexpr,
    FACTOR: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to a block of keys; returns the new maximum, sum of weights and sum of V.

    key_scales, value_scales:  None = elements are what they are
    is_key_N:                  keys that are there; others are not read
    is_seen_MN:                which of them a query sees
    MASKED:                    whether there is any that is not there or not seen
    """
    at_H = tl.arange(0, H)
    head_N = slot_N * num_kv_heads + kv_head
    from_NH = (head_N * HEAD_DIM)[:, None] + at_H[None, :]
    is_element_NH = (at_H < HEAD_DIM)[None, :]
    if MASKED:
        is_element_NH = is_element_NH & is_key_N[:, None]
    if MASKED or H != HEAD_DIM:
        key_NH = tl.load(keys + from_NH, mask=is_element_NH, other=0.0)
        value_NH = tl.load(values + from_NH, mask=is_element_NH, other=0.0)
    else:
        key_NH = tl.load(keys + from_NH)
        value_NH = tl.load(values + from_NH)
    scores_MN = tl.dot(query_MH, tl.trans(key_NH.to(query_MH.dtype)), input_precision="ieee")
    if key_scales is not None:
        key_scale_N = tl.load(key_scales + head_N, mask=is_key_N, other=0.0)
        scores_MN = scores_MN * key_scale_N[None, :]
    scores_MN = as_scores(scores_MN, inner, outer)
    if MASKED:
        scores_MN = tl.where(is_seen_MN, scores_MN, float("-inf"))
    weights_MN, decay_M, top_M, total_M = update_softmax(scores_MN, top_M, total_M)
    if value_scales is not None:
        value_scale_N = tl.load(value_scales + head_N, mask=is_key_N, other=0.0)
        weights_MN = weights_MN * value_scale_N[None, :]
    sum_MH = tl.dot(
        weights_MN.to(FACTOR),
        value_NH.to(FACTOR),
        sum_MH * decay_M[:, None],
        input_precision="ieee",
    )
    return top_M, total_M, sum_MH
