"""Norms with their weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.models.config import NormConfig
from remora.engine.parallel.shard import Axis, Shard
from remora.kernels.norm import add_rms_norm, rms_norm


class RMSNorm:
    """Norm by the root mean square over the last dimension.

    weight:  [dim], with the offset added
    offset:  added to the checkpoint's weight, which is then kept in float32, because 16-bit formats
             have few digits near 1
    """

    bias: Tensor | None = None

    def __init__(
        self,
        dim: Axis | int,
        *,
        eps: float,
        dtype: torch.dtype,
        device: str,
        offset: float = 0.0,
    ) -> None:
        self.axis = Axis.whole(dim) if isinstance(dim, int) else dim
        kept = torch.float32 if offset else dtype
        self.weight = torch.empty(len(self.axis.held), dtype=kept, device=device)
        self.eps = eps
        self.offset = offset

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
        yield (
            f"{name}.weight",
            Shard(memory=self.weight, axes=(self.axis,), offset=self.offset),
        )


class LayerNorm:
    """Layer norm: subtracts the mean first; the bias is optional."""

    def __init__(
        self, dim: int, *, eps: float, bias: bool, dtype: torch.dtype, device: str
    ) -> None:
        self.weight = torch.empty(dim, dtype=dtype, device=device)
        self.bias = torch.empty(dim, dtype=dtype, device=device) if bias else None
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise [..., dim]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, delta: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add `delta` to the residual stream in place; return (normalised stream, stream)."""
        if delta is not None:
            residual += delta
        return self(residual), residual

    def tensors(self, name: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the tensor that it fills."""
        axes = (Axis.whole(len(self.weight)),)
        yield f"{name}.weight", Shard(memory=self.weight, axes=axes)
        if self.bias is not None:
            yield f"{name}.bias", Shard(memory=self.bias, axes=axes)


Norm = RMSNorm | LayerNorm


def make_norm(config: NormConfig, dim: int, *, dtype: torch.dtype, device: str) -> Norm:
    """Make a norm over `dim` elements."""
    if config.kind == "layer":
        return LayerNorm(dim, eps=config.eps, bias=config.bias, dtype=dtype, device=device)
    return RMSNorm(dim, eps=config.eps, dtype=dtype, device=device, offset=config.offset)
