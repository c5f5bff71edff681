"""Rotary position embedding, half-split: element i turns with element i + dim / 2.

Knows angles only as cosines and sines; which angle belongs to which position is decided in
`engine/layers/rotary.py`.
"""

from __future__ import annotations

from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of every token by its token's angles.

    x:         [num_tokens, num_heads, head_dim]
    cos, sin:  [num_tokens, head_dim / 2] in the dtype of `x`
    Returns a new contiguous tensor [num_tokens, num_heads, head_dim].
    """
    return apply_rope_reference(x, cos, sin)


def apply_rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rope` in torch. Writes into halves: one allocation instead of four."""
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half], x[..., half:]
    rotated = x.new_empty(x.shape)
    rotated[..., :half] = first * cos
    rotated[..., half:] = second * cos
    rotated[..., :half].addcmul_(second, sin, value=-1)
    rotated[..., half:].addcmul_(first, sin)
    return rotated
