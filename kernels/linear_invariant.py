"""A product with a weight whose rows do not depend on each other, for deterministic inference.

Libraries choose another kernel, and so another order of sums, for another number of rows: then a
request's tokens depend on who else is in its batch. Here tiles and the order of sums are the same
for any number of rows. (Norms, activations and torch's log_softmax go row by row anyway.)

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from remora.kernels.dispatch import by_triton


def linear_invariant(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Compute x W^T + b, each row to the same bits in whatever company.

    x:       [T, I] bfloat16, float16 or float32, each row in one piece
    weight:  [O, I] of the type of `x`
    bias:    [O], any float type
    out:     [T, O] of the type of `x`, in one piece, to be overwritten; None = new memory

    Where torch computes there is no such promise.
    Returns `out`, in the dtype of `x`. Raises ValueError where shapes or types do not fit.
    """
    if x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"rows of {x.shape[1]} {x.dtype} for a weight {list(weight.shape)} {weight.dtype}"
        )
    if out is None:
        out = x.new_empty(len(x), len(weight))
    if out.shape != (len(x), len(weight)) or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, not {x.dtype} of rows x outputs")
    if by_triton(x.device):
        from remora.kernels.gpu import linear_invariant as kernels

        kernels.multiply(x, weight, bias, out)
        return out
    return out.copy_(linear_invariant_reference(x, weight, bias))


def linear_invariant_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear_invariant` in torch, with float32 sums."""
    product = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return product.to(x.dtype)
