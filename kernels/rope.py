"""Rotary position embedding (arXiv:2104.09864): rotates pairs of a head's elements.

Pairs are elements i and i + P (half-split) or 2 i and 2 i + 1 (interleaved). The P pairs are a
head's first elements; the others are not rotated (partial rotation). Knows angles only as cosines
and sines, which `engine/layers/rotary.py` computes from positions.

With Triton the kernel is that of `gpu/rope.py`, for float32, float16 and bfloat16. It rounds once,
the reference twice.

Legend: P pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remora.kernels.dispatch import by_triton


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate every head of every token by its token's angles.

    x:         [num_tokens, num_heads, head_dim]; any token and head stride
    cos, sin:  [num_tokens, P] in the dtype of `x`; at most head_dim / 2 pairs
    Returns a new contiguous tensor [num_tokens, num_heads, head_dim].
    """
    if not by_triton(x.device):
        return apply_rope_reference(x, cos, sin, interleaved=interleaved)
    from remora.kernels.gpu import rope as kernels

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernels.apply_rope(x, cos, sin, out, interleaved=interleaved)
    return out


def apply_rope_reference(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> Tensor:
    """`apply_rope` in torch. Writes into its parts: one allocation instead of four."""
    pairs = cos.shape[1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = x.new_empty(x.shape)
    first, second = _pairs(x, pairs, interleaved)
    to_first, to_second = _pairs(rotated, pairs, interleaved)
    to_first.copy_(first * cos)
    to_second.copy_(second * cos)
    to_first.addcmul_(second, sin, value=-1)
    to_second.addcmul_(first, sin)
    if 2 * pairs < x.shape[-1]:
        rotated[..., 2 * pairs :] = x[..., 2 * pairs :]
    return rotated


def _pairs(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and second elements of the pairs."""
    if interleaved:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    return x[..., :pairs], x[..., pairs : 2 * pairs]
