"""Root-mean-square norm with its weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from remora.engine.parallel.shard import Axis, Shard
from remora.kernels.norm import add_rms_norm, rms_norm


class RMSNorm:
    """Norm over the last dimension, of size `dim`."""

    def __init__(self, dim: int, *, eps: float, dtype: torch.dtype, device: str) -> None:
        self.weight = torch.empty(dim, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise [..., dim]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, delta: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add `delta` to the residual stream in place; return (normalised stream, stream)."""
        if delta is None:
            return self(residual), residual
        return add_rms_norm(delta, residual, self.weight, self.eps)

    def tensors(self, name: str) -> Iterator[tuple[str, Shard]]:
        """Yield the checkpoint name and the tensor that it fills."""
        yield f"{name}.weight", Shard(memory=self.weight, axes=(Axis.whole(len(self.weight)),))
