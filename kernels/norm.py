"""Root-mean-square norm, alone or after adding the residual stream.

Numerics are those of the reference models: normalise in float32, round to the input's dtype,
then multiply by the weight. Knows nothing of layers.

With Triton the kernel is that of `gpu/norm.py`: for float32, float16 and bfloat16, and rows of at
most 32768 elements.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.kernels.dispatch import by_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension.

    x:       [..., dim], any row stride
    weight:  [dim] in the dtype of `x`, or float32: then the product is rounded too
    Returns a new tensor [..., dim] in the dtype of `x`.
    """
    if not by_triton(x.device):
        return rms_norm_reference(x, weight, eps)
    return _by_kernel(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream, in place, and normalise the sum.

    x, residual:  [..., dim] of one dtype; `residual` is overwritten with the sum
    Returns (normalised sum, residual).
    """
    if not by_triton(x.device):
        return add_rms_norm_reference(x, residual, weight, eps)
    return _by_kernel(x, residual, weight, eps), residual


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in torch. Without a weight torch keeps float32 inside and rounds once."""
    normed = F.rms_norm(x, (x.shape[-1],), None, eps)
    return normed * weight if weight.dtype is x.dtype else (normed * weight).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in torch."""
    residual += x
    return rms_norm_reference(residual, weight, eps), residual


def _by_kernel(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    from remora.kernels.gpu import norm as kernels

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-2] if x.ndim > 2 else 1, x.shape[-1])
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    # `view` raises rather than copies: the kernel must write to the caller's memory.
    stream = None if residual is None else residual.view(rows.shape)
    kernels.rms_norm(rows, stream, weight, eps, out.view(rows.shape))
    return out
