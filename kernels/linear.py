"""Products with a weight matrix, which may be packed once for the machine at hand.

For bfloat16 on a CPU oneDNN has a blocked layout of its own: measured here 1.5 to 2 times F.linear
for up to 64 rows, never slower, and the same bits. The two operations are private to torch, so they
are named in this file only, tried before they are trusted, and F.linear stands behind them.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b.

    x:       [num_tokens, in_features]
    weight:  [out_features, in_features], plain or out of `pack_weight`
    bias:    [out_features] or None
    Returns [num_tokens, out_features] in the dtype of `x`.
    """
    if weight.is_mkldnn:
        return _packed_linear(x, weight, bias)
    return linear_reference(x, weight, bias)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` with a plain weight."""
    return F.linear(x, weight, bias)


def pack_weight(weight: Tensor) -> Tensor:
    """Return a packed copy of the weight, or the weight itself where packing is of no use."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not can_pack():
        return weight
    return _pack(weight)


@cache
def can_pack() -> bool:
    """Whether this torch and this CPU have packed bfloat16 products, and they are right."""
    x, weight = torch.ones(2, 32, dtype=torch.bfloat16), torch.ones(16, 32, dtype=torch.bfloat16)
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        return bool((_packed_linear(x, _pack(weight), None) == 32).all())
    except (AttributeError, RuntimeError):
        return False


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
