"""QK norm, rotation and storing of K and V, between projection and attention.

With Triton this is one launch (`gpu/rope_store.py`) that reads the projection once; otherwise the
functions of `norm.py`, `rope.py` and `kv_store.py`, which specify it, run one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from remora.kernels.dispatch import by_triton
from remora.kernels.kv_store import check_scales, store_kv_reference
from remora.kernels.norm import rms_norm_reference
from remora.kernels.rope import apply_rope_reference


def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_pages: Tensor,
    slots: Tensor,
    *,
    scales: Tensor | None = None,
    static_scales: Tensor | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """Return rotated queries; store rotated K, and V, in the slots of their tokens.

    query:                    [num_tokens, num_heads, head_dim], each token's heads contiguous
    key, value:               [num_tokens, num_kv_heads, head_dim], likewise; all three may be parts
                              of one projection, and none is changed
    cos, sin, interleaved:    as in `rope.apply_rope`
    kv_pages, slots, scales, static_scales:  as in `kv_store.store_kv`
    norms:                    weights [head_dim] of the QK norms, applied to each head before its
                              rotation; None = no norms
    Returns a new contiguous tensor [num_tokens, num_heads, head_dim].

    Raises TypeError for quantised pages without scales, or other pages with scales.
    """
    check_scales(kv_pages, scales)
    tensors = (query, key, value, cos, sin, kv_pages, slots)
    options: dict[str, Any] = {
        "scales": scales,
        "static_scales": static_scales,
        "norms": norms,
        "eps": eps,
        "interleaved": interleaved,
    }
    if not by_triton(query.device):
        return rotate_and_store_reference(*tensors, **options)
    from remora.kernels.gpu import rope_store as kernels

    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    kernels.rotate_and_store(*tensors, out, **options)
    return out


def rotate_and_store_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_pages: Tensor,
    slots: Tensor,
    *,
    scales: Tensor | None = None,
    static_scales: Tensor | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """`rotate_and_store` in torch."""
    if norms is not None:
        query = rms_norm_reference(query, norms[0], eps)
        key = rms_norm_reference(key, norms[1], eps)
    key = apply_rope_reference(key, cos, sin, interleaved=interleaved)
    store_kv_reference(key, value, kv_pages, slots, scales, static_scales)
    return apply_rope_reference(query, cos, sin, interleaved=interleaved)
