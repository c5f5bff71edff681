"""Functions that the attention kernels share: online softmax, one block of keys, page lookup.

Softmax reads the keys once, block by block, and keeps a running maximum and sum (Milakov and
Gimelshein, arXiv:1805.02867); scores are in units of log 2, so that exp2 replaces exp. Knows one
K/V head; knows nothing of how a row's keys are divided between programs.

Arguments that change from step to step (number of rows, tables and their strides) are declared
`do_not_specialize` in the kernels: a specialisation would take seconds to compile.

Legend, and suffixes of blocks: R rows of a step, M queries, N keys, H elements of a head, padded to
a power of two.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.arch import converts_e4m3

LOG2_E = math.log2(math.e)
# Format of the product of weights and V by the format of queries, for wide and 8-bit pages. 8-bit V
# is exact in bfloat16, where weights times small scales stay normal numbers.
FACTORS = {
    torch.float32: (tl.float32, tl.float32),
    torch.float16: (tl.float16, tl.bfloat16),
    torch.bfloat16: (tl.bfloat16, tl.bfloat16),
}


def factor_of(query: Tensor, pages: Tensor) -> Any:
    """Return the format in which weights and V are multiplied.

    Raises ValueError for pages that this GPU cannot convert.
    """
    if pages.dtype is torch.float8_e4m3fn and not converts_e4m3(pages.device):
        raise ValueError(
            "this GPU does not convert float8_e4m3fn; keep K and V in float8_e5m2, in int8 or in "
            f"{query.dtype}"
        )
    return FACTORS[query.dtype][pages.itemsize == 1]


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float | None]:
    """Return the factors of a score before and after the cap (None = no cap).

    With x = q.k * scale, cap * tanh(x / cap) is cap * (1 - 2 / (1 + exp(2 x / cap))).
    """
    if soft_cap is None:
        return scale * LOG2_E, None
    return 2 * LOG2_E * scale / soft_cap, soft_cap * LOG2_E


def row_block(num_rows: int) -> int:
    """Return the padded length of a vector of rows: one of few, as each compiles a kernel."""
    block = 16
    while block < num_rows:
        block *= 4
    return block


@triton.jit
def find_row(counts_R: tl.tensor, item: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the row of an item and the row's first item.

    counts_R:  number of items of each row; items are numbered row after row
    """
    is_before_R = tl.cumsum(counts_R, 0) <= item
    row = tl.sum(is_before_R.to(tl.int32), 0)
    return row, tl.sum(tl.where(is_before_R, counts_R, 0), 0)


@triton.jit
def find_slots(
    table: tl.tensor, at_N: tl.tensor, end: tl.tensor, PAGE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the slots of positions and which positions are before `end`; others get slot 0."""
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
    """Return the initial maximum and sum of weights of queries, before any key.

    sinks:     scores of the heads' sinks; None = no sinks
    has_sink:  whether this program counts them; exactly one program of a row does
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
    """Convert scores, -inf for invisible keys, into weights.

    Returns the weights, the factor of earlier sums, the new maximum and the new sum. A query that
    has seen no key yet has the maximum -inf and weights of 0.
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
    """Attend to a block of keys; return the new maximum, sum of weights and sum of V.

    key_scales, value_scales:  None = pages are not quantised
    is_key_N:                  keys that exist; others are not read
    is_seen_MN:                keys that each query sees
    MASKED:                    whether some key may not exist or not be seen
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
    if key_scales is not None:
        key_scale_N = tl.load(key_scales + head_N, mask=is_key_N, other=0.0)
        value_scale_N = tl.load(value_scales + head_N, mask=is_key_N, other=0.0)
    scores_MN = tl.dot(query_MH, tl.trans(key_NH.to(query_MH.dtype)), input_precision="ieee")
    if key_scales is not None:
        scores_MN = scores_MN * key_scale_N.to(tl.float32)[None, :]
    scores_MN = as_scores(scores_MN, inner, outer)
    if MASKED:
        scores_MN = tl.where(is_seen_MN, scores_MN, float("-inf"))
    weights_MN, decay_M, top_M, total_M = update_softmax(scores_MN, top_M, total_M)
    if value_scales is not None:
        weights_MN = weights_MN * value_scale_N.to(tl.float32)[None, :]
    sum_MH = tl.dot(
        weights_MN.to(FACTOR),
        value_NH.to(FACTOR),
        sum_MH * decay_M[:, None],
        input_precision="ieee",
    )
    return top_M, total_M, sum_MH
