"""Batch-invariant product with a weight, for deterministic inference.

Libraries choose the kernel, and with it the order of sums, by the number of rows, so a request's
tokens depend on its batch. Here tiles and the order of sums are the same for any number of rows.
(Norms, activations and torch's log_softmax work row by row anyway.)

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from remora.kernels.dispatch import by_triton


def linear_invariant(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Compute x W^T + b; a row's bits do not depend on other rows (with Triton only).

    x:       [T, I] bfloat16, float16 or float32, each row contiguous
    weight:  [O, I] of the type of `x`
    bias:    [O], any float type
    out:     [T, O] of the type of `x`, contiguous, overwritten; None = new memory

    Returns `out`, in the dtype of `x`. Raises ValueError where shapes or types do not fit.
    """
    if x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"rows of {x.shape[1]} {x.dtype} for a weight {list(weight.shape)} {weight.dtype}"
        )
    if out is None:
        out = x.new_empty(len(x), len(weight))
    if out.shape != (len(x), len(weight)) or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)}; it must be a contiguous {x.dtype} [T, O]"
        )
    if by_triton(x.device):
        from remora.kernels.gpu import linear_invariant as kernels

        kernels.multiply(x, weight, bias, out)
        return out
    return out.copy_(linear_invariant_reference(x, weight, bias))


def linear_invariant_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear_invariant` in torch, with float32 sums."""
    product = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return product.to(x.dtype)
