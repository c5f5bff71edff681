"""What happens to heads between their projection and attention, in one call.

Queries and K are normalised where a model has norms of heads, and rotated; K and V are stored. On a
GPU all of it is one launch (`gpu/rope_store.py`), where there is triton, which reads the projection
once; elsewhere it is the functions of `norm.py`, `rope.py` and `kv_store.py` one after the other,
which specify it.
"""

from __future__ import annotations

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
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """Return rotated queries, and store K, rotated, and V in the slots of their tokens.

    query:                    [num_tokens, num_heads, head_dim], a token's heads in one piece
    key, value:               [num_tokens, num_kv_heads, head_dim]; like the query they may be parts
                              of one projection; none of them is changed
    cos, sin, interleaved:    as in `rope.apply_rope`
    kv_pages, slots, scales:  as in `kv_store.store_kv`
    norms:                    weights [head_dim] of the norms of query and key, applied to each head
                              before it is rotated; None = there are none
    Returns a new contiguous tensor [num_tokens, num_heads, head_dim].

    Raises TypeError if quantised pages come without scales, or others with them.
    """
    check_scales(kv_pages, scales)
    if not by_triton(query.device):
        return rotate_and_store_reference(
            query,
            key,
            value,
            cos,
            sin,
            kv_pages,
            slots,
            scales=scales,
            norms=norms,
            eps=eps,
            interleaved=interleaved,
        )
    from remora.kernels.gpu import rope_store as kernels

    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    kernels.rotate_and_store(
        query,
        key,
        value,
        cos,
        sin,
        kv_pages,
        slots,
        out,
        scales=scales,
        norms=norms,
        eps=eps,
        interleaved=interleaved,
    )
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
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """`rotate_and_store` in torch."""
    if norms is not None:
        query = rms_norm_reference(query, norms[0], eps)
        key = rms_norm_reference(key, norms[1], eps)
    key = apply_rope_reference(key, cos, sin, interleaved=interleaved)
    store_kv_reference(key, value, kv_pages, slots, scales)
    return apply_rope_reference(query, cos, sin, interleaved=interleaved)
