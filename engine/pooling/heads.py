"""Heads of pooling models: pooling of hidden states, then layers.

Knows neither requests nor the meaning of the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.configs.sections.pooling import Method
from remora.engine.layers import mlp
from remora.engine.layers.norm import LayerNorm
from remora.engine.parallel.shard import Shard
from remora.engine.pooling.rows import RowBatch
from remora.engine.pooling.stages import Stage

ACTIVATIONS: Mapping[str, mlp.Activate] = {
    **{str(name): activate for name, activate in mlp.ACTIVATIONS.items()},
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def pool(hidden: Tensor, rows: RowBatch, method: Method) -> Tensor:
    """Return the pooled state of each row [num_rows, hidden_size], in float32."""
    starts = torch.tensor(rows.starts, device=hidden.device)
    lengths = torch.tensor(rows.lengths, device=hidden.device)
    match method:
        case "cls":
            return hidden[starts].float()
        case "last":
            return hidden[starts + lengths - 1].float()
        case "max":
            return torch.stack([part.amax(0) for part in _parts(hidden, rows)]).float()
        case "mean":
            return torch.stack([part.float().mean(0) for part in _parts(hidden, rows)])
        case "weighted_mean":
            return torch.stack([_weighted(part.float()) for part in _parts(hidden, rows)])


def _parts(hidden: Tensor, rows: RowBatch) -> tuple[Tensor, ...]:
    return torch.split(hidden, list(rows.lengths))


def _weighted(part: Tensor) -> Tensor:
    weights = torch.arange(1, len(part) + 1, device=part.device, dtype=part.dtype)
    return (weights / weights.sum()) @ part


class Head:
    """Pooling and the layers after it. Computes in float32 for every dtype of the model.

    methods:  pooling methods; their results are concatenated
    """

    def __init__(
        self, methods: tuple[Method, ...], stages: tuple[Stage, ...], *, device: str
    ) -> None:
        self.methods = methods
        self.stages = [_StageLayer(stage, device) for stage in stages]

    def __call__(self, hidden: Tensor, rows: RowBatch) -> Tensor:
        """Return the outputs of the rows [num_rows, size], in float32."""
        return self.apply_layers(
            torch.cat([pool(hidden, rows, method) for method in self.methods], dim=1)
        )

    def apply_layers(self, pooled: Tensor) -> Tensor:
        """Return the outputs [n, size] of the layers for pooled states [n, inputs], in float32."""
        for stage in self.stages:
            pooled = stage(pooled)
        return pooled

    def tensors(self, folder: str | None) -> Iterator[tuple[str, Shard]]:
        """Yield checkpoint names and memory of the layers with weights in `folder`."""
        for layer in self.stages:
            if layer.stage.folder == folder:
                yield from layer.tensors()


class _StageLayer:
    def __init__(self, stage: Stage, device: str) -> None:
        self.stage = stage
        self.activate = ACTIVATIONS.get(stage.activation)
        self.norm: LayerNorm | None = None
        dtype = torch.float32
        if stage.is_norm:
            self.norm = LayerNorm(
                stage.outputs, eps=stage.eps, bias=stage.bias, dtype=dtype, device=device
            )
            return
        self.weight = torch.empty(stage.outputs, stage.inputs, dtype=dtype, device=device)
        self.bias = torch.empty(stage.outputs, dtype=dtype, device=device) if stage.bias else None

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias) if self.norm is None else self.norm(x)
        return y if self.activate is None else self.activate(y)

    def tensors(self) -> Iterator[tuple[str, Shard]]:
        if self.norm is not None:
            yield from self.norm.tensors(self.stage.name)
            return
        yield f"{self.stage.name}.weight", Shard.whole(self.weight)
        if self.bias is not None:
            yield f"{self.stage.name}.bias", Shard.whole(self.bias)
