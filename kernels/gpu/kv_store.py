"""Triton kernel of `kernels/kv_store.py`, which specifies it.

Legend, and suffixes of blocks: as in `heads.py`; T tokens, K K/V heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.heads import OPTIONS, blocks_of, load_heads, store_in_slot

FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def store_kv(
    key: Tensor,
    value: Tensor,
    kv_pages: Tensor,
    slots: Tensor,
    scales: Tensor | None,
    static_scales: Tensor | None,
) -> None:
    """Write K and V of tokens to their slots.

    key, value:     [T, K, D], each head contiguous
    kv_pages:       [2, pages, page_size, K, D]; K and V each contiguous
    slots:          [T] int64
    scales:         [2, pages, page_size, K] bfloat16 of int8 and float8
    static_scales:  [2, K] bfloat16 contiguous, of all tokens
    """
    num_tokens, num_heads, dim = key.shape
    if key.numel() == 0:
        return
    assert key.stride(2) == value.stride(2) == 1
    pages, scales, quantised = slot_memory(kv_pages, scales)
    assert static_scales is None or static_scales.is_contiguous()
    blocks = blocks_of(dim, dim // 2)
    store_kernel[(num_tokens, triton.cdiv(num_heads, blocks["M"]), 2)](
        key,
        value,
        pages,
        scales,
        static_scales,
        slots,
        num_heads,
        dim,
        dim // 2,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pages.stride(0),
        scales.stride(0),
        QUANTISED=quantised,
        **blocks,
        **OPTIONS,
    )


def slot_memory(kv_pages: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor, str]:
    """Return pages and scales for kernels, and the format for `store_in_slot`.

    float8 pages are viewed as bytes; without scales, pages are a placeholder that is not read.
    """
    assert kv_pages[0].is_contiguous()
    quantised = FORMATS.get(kv_pages.dtype, "no")
    pages = kv_pages.view(torch.uint8) if quantised.startswith("e") else kv_pages
    if scales is None:
        return pages, pages, quantised
    assert scales[0].is_contiguous()
    return pages, scales, quantised


@triton.jit
def store_kernel(
    key: tl.tensor,
    value: tl.tensor,
    pages: tl.tensor,
    scales: tl.tensor,
    static_scales: tl.tensor | None,
    slots: tl.tensor,
    num_heads: int,
    dim: int,
    pairs: int,
    key_stride: int,
    key_head: int,
    value_stride: int,
    value_head: int,
    pages_stride: int,
    scales_stride: int,
    QUANTISED: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """Program (token, M heads, K or V)."""
    token = tl.program_id(0).to(tl.int64)
    head_M = tl.program_id(1) * M + tl.arange(0, M)
    part = tl.program_id(2).to(tl.int64)
    if part == 0:
        from_M = key + token * key_stride + head_M * key_head
    else:
        from_M = value + token * value_stride + head_M * value_head
    is_head_M = head_M < num_heads
    first_MC, second_MC, rest_MR = load_heads(from_M, is_head_M, pairs, dim, False, C, R)
    at_M = tl.load(slots + token) * num_heads + head_M
    store_in_slot(
        pages + part * pages_stride + at_M * dim,
        scales + part * scales_stride + at_M,
        static_scales,
        part * num_heads + head_M,
        is_head_M,
        first_MC,
        second_MC,
        rest_MR,
        pairs,
        dim,
        key.dtype.element_ty,
        QUANTISED,
        False,
    )
