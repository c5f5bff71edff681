"""The one linear layer of every model.

Projections that share an input are fused: one weight whose output columns are named parts, each
with a place of its own in the checkpoint. Knows nothing of what the parts mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from remora.kernels.linear import linear, pack_weight
from remora.kernels.memory import buffer


def allocate_weight(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Allocate a weight; on a CPU from the system itself, which gets it back once it is packed."""
    if device == "cpu":
        return buffer(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


class Linear:
    """y = x W^T + b.

    weight:  [sum of the parts, in_features]
    bias:    [sum of the parts] or None
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.parts = dict(parts)
        out_features = sum(self.parts.values())
        self.weight = allocate_weight((out_features, in_features), dtype, device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """Project [num_tokens, in_features] to [num_tokens, sum of the parts]."""
        return linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Put the loaded weight into the layout that this machine multiplies fastest.

        The views out of `tensors` are void afterwards.
        """
        self.weight = pack_weight(self.weight)

    def release(self) -> tuple[Tensor, Tensor | None]:
        """Hand weight and bias over to who computes with them from now on; this layer cannot."""
        weight, bias = self.weight, self.bias
        self.weight, self.bias = weight.new_empty(0), None
        return weight, bias

    def tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yield each checkpoint name and the view of this layer's memory that it fills."""
        start = 0
        for part, size in self.parts.items():
            yield f"{prefix}{part}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{prefix}{part}.bias", self.bias[start : start + size]
            start += size
