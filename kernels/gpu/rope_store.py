"""Triton kernel of `kernels/rope_store.py`: QK norm, rotation and storing in one launch.

The projection is read once; rotated queries are written to a new tensor, K and V to their slots.

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
    static_scales: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    interleaved: bool,
) -> None:
    """Rotate queries, rotate K, store K and V.

    query:          [T, H, D], each token's heads contiguous
    key, value:     [T, K, D], likewise
    cos, sin:       [T, P], each row contiguous
    kv_pages:       [2, pages, page_size, K, D]; K and V each contiguous
    slots:          [T] int64
    out:            [T, H, D] contiguous; overwritten
    scales:         [2, pages, page_size, K] bfloat16 of int8 and float8
    static_scales:  [2, K] bfloat16 contiguous, of all tokens
    norms:          weights [D] of query and key
    """
    num_tokens, num_heads, dim = query.shape
    num_kv_heads, pairs = key.shape[1], cos.shape[1]
    if num_tokens == 0:
        return
    for each in (query, key, value):
        assert each.stride()[1:] == (dim, 1)
    assert cos.stride() == sin.stride() == (cos.stride(0), 1)
    pages, scales, quantised = slot_memory(kv_pages, scales)
    assert static_scales is None or static_scales.is_contiguous()
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
        static_scales,
        slots,
        out,
        eps,
        num_heads,
        num_kv_heads,
        dim,
        pairs,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        cos.stride(0),
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
    static_scales: tl.tensor | None,
    slots: tl.tensor,
    out: tl.tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    pairs: int,
    query_stride: int,
    key_stride: int,
    value_stride: int,
    cos_stride: int,
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
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = query.dtype.element_ty
    is_query, is_value, head_M = _heads_of(group, num_heads, num_kv_heads, M)
    from_M, norm = key + token * key_stride + head_M * dim, key_norm
    if is_query:
        from_M, norm = query + token * query_stride + head_M * dim, query_norm
    elif is_value:
        from_M = value + token * value_stride + head_M * dim
    is_head_M = head_M < tl.where(is_query, num_heads, num_kv_heads)
    first_MC, second_MC, rest_MR = load_heads(from_M, is_head_M, pairs, dim, INTERLEAVED, C, R)
    if not is_value:
        if NORMS:
            first_MC, second_MC, rest_MR = normalise(
                first_MC, second_MC, rest_MR, norm, eps, pairs, dim, dtype, INTERLEAVED
            )
        at = token * cos_stride
        first_MC, second_MC = rotate(first_MC, second_MC, cos + at, sin + at, pairs, dtype)
    if is_query:
        to_M = out + (token * num_heads + head_M) * dim
        store_heads(to_M, is_head_M, first_MC, second_MC, rest_MR, pairs, dim, INTERLEAVED)
    else:
        part, at_M = is_value.to(tl.int64), tl.load(slots + token) * num_kv_heads + head_M
        store_in_slot(
            pages + part * pages_stride + at_M * dim,
            scales + part * scales_stride + at_M,
            static_scales,
            part * num_kv_heads + head_M,
            is_head_M,
            first_MC,
            second_MC,
            rest_MR,
            pairs,
            dim,
            dtype,
            QUANTISED,
            INTERLEAVED,
        )


@triton.jit
def _heads_of(
    group: tl.tensor, num_heads: int, num_kv_heads: int, M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return whether a group's heads are of the query, whether of V, and their numbers."""
    groups, kv_groups = tl.cdiv(num_heads, M), tl.cdiv(num_kv_heads, M)
    is_query, is_value = group < groups, group >= groups + kv_groups
    first_group = tl.where(is_query, 0, tl.where(is_value, groups + kv_groups, groups))
    return is_query, is_value, (group - first_group) * M + tl.arange(0, M)
