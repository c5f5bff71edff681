"""Products with a weight matrix, which can be packed once for this machine.

For bfloat16 on a CPU oneDNN has a blocked layout: measured 1.5 to 2 times as fast as F.linear for
up to 64 rows, never slower, with the same bits. The two operations are private to torch, so only
this module uses them, after a trial, and falls back to F.linear.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b.

    x:       [num_tokens, in_features]
    weight:  [out_features, in_features], plain or from `pack_weight`
    bias:    [out_features] or None
    Returns [num_tokens, out_features] in the dtype of `x`.
    """
    if weight.is_mkldnn:
        return _packed_linear(x, weight, bias)
    return linear_reference(x, weight, bias)


def linear_to_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` with a float32 result, if the device writes its sums unrounded.

    Otherwise the result has the dtype of `x`.
    """
    if not writes_float32(x.device, x.dtype):
        return linear(x, weight, bias)
    y = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return y if bias is None else y.add_(bias)


def writes_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products of this dtype can have float32 results: of 16 bits, with CUDA.

    False while torch.compile traces: it generates its own kernels.
    """
    is_cuda = device.type == "cuda" and torch.version.cuda is not None  # ROCm is `cuda` too
    return is_cuda and dtype.itemsize == 2 and not torch.compiler.is_compiling()


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` with a plain weight."""
    return F.linear(x, weight, bias)


def pack_weight(weight: Tensor) -> Tensor:
    """Return a packed copy of the weight, or the weight itself if it cannot be packed."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not can_pack():
        return weight
    return _pack(weight)


@cache
def can_pack() -> bool:
    """Return whether packed bfloat16 products work with this torch and this CPU."""
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
