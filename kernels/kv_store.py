"""Writing K and V of new tokens to their slots in paged memory, as they are or quantised.

Quantised pages hold int8 or float8 e4m3, and a scale for each token and head: the greatest size of
its elements becomes the format's greatest number. So a token's bits depend on no other token, and
not on the step that stored it. Knows slots; knows nothing of who owns a page.

On a GPU the kernel is that of `gpu/kv_store.py`, where there is triton, on every make of GPU:
e4m3 is rounded without the instructions that some lack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remora.kernels.dispatch import by_triton

# The greatest number of the formats in which K and V may be quantised.
GREATEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Smaller heads become zeros: the inverse of their scale would not be finite.
LEAST_SIZE = 1e-30


def store_kv(
    key: Tensor, value: Tensor, kv_pages: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    """Scatter K and V of the step's tokens into the pages of one layer, in place.

    key, value:  [num_tokens, num_kv_heads, head_dim]; heads may lie in a wider tensor
    kv_pages:    [2, num_pages, page_size, num_kv_heads, head_dim]; 0 is K, 1 is V; in the dtype of
                 `key`, int8 or float8_e4m3fn
    slots:       [num_tokens] int64, page_id * page_size + offset; two tokens share a slot only in
                 the dump page 0
    scales:      [2, num_pages, page_size, num_kv_heads] float32, by which int8 and float8 are
                 multiplied when they are read; written to as well

    What is stored is always finite (NaN becomes 0, infinities the largest number of the dtype of
    `key`). Attention multiplies slots past a row's end by a weight of 0; a NaN left there by one
    sequence would reach the next owner of the page.

    Raises TypeError if quantised pages come without scales, or others with them.
    """
    check_scales(kv_pages, scales)
    if not by_triton(key.device):
        store_kv_reference(key, value, kv_pages, slots, scales)
        return
    from remora.kernels.gpu import kv_store as kernels

    kernels.store_kv(key, value, kv_pages, slots, scales)


def store_kv_reference(
    key: Tensor, value: Tensor, kv_pages: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    """`store_kv` in torch."""
    flat = kv_pages.flatten(1, 2)
    for part, heads in enumerate((key, value)):
        stored = heads.nan_to_num()
        if scales is not None:
            stored, scale = quantise(stored, kv_pages.dtype)
            scales.flatten(1, 2)[part].index_copy_(0, slots, scale)
        # As bytes: torch copies floats of 8 bits by no index.
        to, stored = (
            (each.view(torch.uint8) if each.itemsize == 1 else each)
            for each in (flat[part], stored)
        )
        to.index_copy_(0, slots, stored)


def quantise(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return finite heads [..., head_dim] in a format of 8 bits, and their scales [...] float32."""
    size = heads.float().abs().amax(-1).clamp(min=LEAST_SIZE)
    scaled = heads.float() * (GREATEST[dtype] / size).unsqueeze(-1)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), size / GREATEST[dtype]


def check_scales(kv_pages: Tensor, scales: Tensor | None) -> None:
    """Raise TypeError if quantised pages come without scales, or others with them."""
    if (kv_pages.dtype in GREATEST) != (scales is not None):
        claim = "need no scales" if scales is not None else "need scales"
        raise TypeError(f"pages of {kv_pages.dtype} {claim}")
