"""Root-mean-square norm, alone or after adding the residual stream.

Numerics are those of the reference models: normalise in float32, round to the input's dtype,
then multiply by the weight. Knows nothing of layers.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension.

    x:       [..., dim]
    weight:  [dim]
    Returns a new tensor [..., dim] in the dtype of `x`.
    """
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream, in place, and normalise the sum.

    x, residual:  [..., dim]; `residual` is overwritten with the sum
    Returns (normalised sum, residual).
    """
    residual += x
    return rms_norm(residual, weight, eps), residual


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in torch. Without a weight torch keeps float32 inside and rounds once."""
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight
