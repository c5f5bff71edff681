"""Stores K and V of new tokens in the slots of paged memory, unchanged or quantised.

Quantised pages hold int8 or float8 (e4m3 or e5m2) with a scale for each token and head: the token's
own, which maps the largest magnitude to the format's largest value, or a static one of its head, by
which larger values are clipped. A token's bits therefore depend neither on other tokens nor on its
step. Knows slots; knows nothing of page ownership.

With Triton the kernel is that of `gpu/kv_store.py`, on every GPU: float8 is rounded with integer
arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remora.kernels.dispatch import by_triton

# Quantised formats by their names in configurations, and the largest value of each.
KV_DTYPES = {
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
GREATEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SCALE_DTYPE = torch.bfloat16
# Heads of smaller magnitude become zeros: scales stay normal numbers.
LEAST_SIZE = 1e-30


def store_kv(
    key: Tensor,
    value: Tensor,
    kv_pages: Tensor,
    slots: Tensor,
    scales: Tensor | None = None,
    static_scales: Tensor | None = None,
) -> None:
    """Scatter K and V of the step's tokens into the pages of one layer, in place.

    key, value:     [num_tokens, num_kv_heads, head_dim], any token and head stride
    kv_pages:       [2, num_pages, page_size, num_kv_heads, head_dim]; 0 is K, 1 is V; in the dtype
                    of `key`, int8, float8_e4m3fn or float8_e5m2
    slots:          [num_tokens] int64, page_id * page_size + offset; two tokens share a slot only
                    in the dump page 0
    scales:         [2, num_pages, page_size, num_kv_heads] bfloat16, factors of quantised elements,
                    overwritten for the tokens
    static_scales:  [2, num_kv_heads] bfloat16, of K and V of all tokens; None = each has its own

    Stored values are always finite (NaN becomes 0, infinities the largest value of the dtype of
    `key`): attention multiplies slots past a row's end by a weight of 0, and a NaN of one sequence
    would reach the next owner of the page.

    Raises TypeError for quantised pages without scales, or other pages with scales.
    """
    check_scales(kv_pages, scales)
    if not by_triton(key.device):
        store_kv_reference(key, value, kv_pages, slots, scales, static_scales)
        return
    from remora.kernels.gpu import kv_store as kernels

    kernels.store_kv(key, value, kv_pages, slots, scales, static_scales)


def store_kv_reference(
    key: Tensor,
    value: Tensor,
    kv_pages: Tensor,
    slots: Tensor,
    scales: Tensor | None = None,
    static_scales: Tensor | None = None,
) -> None:
    """`store_kv` in torch."""
    flat = kv_pages.flatten(1, 2)
    for part, heads in enumerate((key, value)):
        stored = heads.nan_to_num()
        if scales is not None:
            given = None if static_scales is None else static_scales[part]
            stored, scale = quantise(stored, kv_pages.dtype, given)
            scales.flatten(1, 2)[part].index_copy_(0, slots, scale)
        # As bytes: torch has no indexed copy of 8-bit floats.
        to, stored = (
            (each.view(torch.uint8) if each.itemsize == 1 else each)
            for each in (flat[part], stored)
        )
        to.index_copy_(0, slots, stored)


def quantise(
    heads: Tensor, dtype: torch.dtype, static_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise finite heads [..., head_dim] to 8 bits; return them and scales [...] bfloat16.

    static_scale:  bfloat16, broadcast to the scales; None = each head has its own, of its largest
                   magnitude
    Scales divide as they are stored, rounded. Quotients beyond the format's range, of which own
    scales make none that is half a step away, become its largest value.
    """
    greatest = GREATEST[dtype]
    if static_scale is None:
        size = heads.float().abs().amax(-1).clamp(min=LEAST_SIZE)
        scale = (size / greatest).to(SCALE_DTYPE)
    else:
        scale = static_scale.expand(heads.shape[:-1])
    scaled = (heads.float() / scale.float().unsqueeze(-1)).clamp(-greatest, greatest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def check_scales(kv_pages: Tensor, scales: Tensor | None) -> None:
    """Raise TypeError for quantised pages without scales, or other pages with scales."""
    if (kv_pages.dtype in GREATEST) != (scales is not None):
        claim = "need no scales" if scales is not None else "need scales"
        raise TypeError(f"pages of {kv_pages.dtype} {claim}")
