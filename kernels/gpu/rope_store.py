"""Norm of heads, rotation and storing in one launch: the kernel of `kernels/rope_store.py`.

A projection is read once: rotated queries go to a new tensor, K and V to their slots.

Legend, and suffixes of blocks: as in `heads.py`; T tokens, H query heads, K K/V heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.heads import (
    OPTIONS,
    blocks_of,
    load_heads,
    normalise,
    rotate,
    store_heads,
    store_in_slot,
)
from remora.kernels.gpu.kv_store import slot_memory


def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_pages: Tensor,
    slots: Tensor,
    out: Tensor,
    *,
    scales: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    interleaved: bool,
) -> None:
    """Rotate queries, rotate K, store K and V.

    query:       [T, H, D], a head in one piece
    key, value:  [T, K, D], a head in one piece
    cos, sin:    [T, P], a row in one piece
    kv_pages:    [2, pages, page_size, K, D]; all pages of K in one piece, and of V
    slots:       [T] int64
    out:         [T, H, D] contiguous; overwritten
    scales:      [2, pages, page_size, K] float32 of int8 and fp8
    norms:       weights [D] of query and key
    """
    num_tokens, num_heads, dim = query.shape
    num_kv_heads, pairs = key.shape[1], cos.shape[1]
    if num_tokens == 0:
        return
    for each in (query, key, value):
        assert each.stride(2) == 1
    assert cos.stride(1) == sin.stride(1) == 1
    pages, scales, quantised = slot_memory(kv_pages, scales)
    query_norm, key_norm = (query, key) if norms is None else norms
    blocks = blocks_of(dim, pairs)
    groups, kv_groups = (triton.cdiv(count, blocks["M"]) for count in (num_heads, num_kv_heads))
    rotate_and_store_kernel[(num_tokens, groups + 2 * kv_groups)](
        query,
        key,
        value,
        cos,
        sin,
        query_norm,
        key_norm,
        pages,
        scales,
        slots,
        out,
        eps,
        num_heads,
        num_kv_heads,
        dim,
        pairs,
        groups,
        kv_groups,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cos.stride(0),
        sin.stride(0),
        pages.stride(0),
        scales.stride(0),
        NORMS=norms is not None,
        QUANTISED=quantised,
        INTERLEAVED=interleaved,
        **blocks,
        **OPTIONS,
    )


@triton.jit
def rotate_and_store_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    pages: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    pairs: int,
    groups: int,
    kv_groups: int,
    query_stride: int,
    query_head: int,
    key_stride: int,
    key_head: int,
    value_stride: int,
    value_head: int,
    cos_stride: int,
    sin_stride: int,
    pages_stride: int,
    scales_stride: int,
    NORMS: tl.constexpr,
    QUANTISED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """Program (token, M heads of the query, of K or of V)."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    dtype: tl.constexpr = query.dtype.element_ty
    cos += token * cos_stride
    sin += token * sin_stride
    if group < groups:
        head_M = group * M + tl.arange(0, M)
        first_MC, second_MC, rest_MR = load_heads(
            query + token * query_stride + head_M * query_head,
            head_M < num_heads,
            pairs,
            dim,
            INTERLEAVED,
            C,
            R,
        )
        if NORMS:
            first_MC, second_MC, rest_MR = normalise(
                first_MC, second_MC, rest_MR, query_norm, eps, pairs, dim, dtype, INTERLEAVED
            )
        first_MC, second_MC = rotate(first_MC, second_MC, cos, sin, pairs, dtype)
        to_M = out + (token * num_heads + head_M) * dim
        store_heads(to_M, head_M < num_heads, first_MC, second_MC, rest_MR, pairs, dim, INTERLEAVED)
    else:
        slot = tl.load(slots + token)
        if group < groups + kv_groups:
            head_M = (group - groups) * M + tl.arange(0, M)
            first_MC, second_MC, rest_MR = load_heads(
                key + token * key_stride + head_M * key_head,
                head_M < num_kv_heads,
                pairs,
                dim,
                INTERLEAVED,
                C,
                R,
            )
            if NORMS:
                first_MC, second_MC, rest_MR = normalise(
                    first_MC, second_MC, rest_MR, key_norm, eps, pairs, dim, dtype, INTERLEAVED
                )
            first_MC, second_MC = rotate(first_MC, second_MC, cos, sin, pairs, dtype)
        else:
            pages += pages_stride
            scales += scales_stride
            head_M = (group - groups - kv_groups) * M + tl.arange(0, M)
            first_MC, second_MC, rest_MR = load_heads(
                value + token * value_stride + head_M * value_head,
                head_M < num_kv_heads,
                pairs,
                dim,
                INTERLEAVED,
                C,
                R,
            )
        store_in_slot(
            pages,
            scales,
            slot,
            head_M,
            num_kv_heads,
            first_MC,
            second_MC,
            rest_MR,
            pairs,
            dim,
            dtype,
            QUANTISED,
            INTERLEAVED,
        )
