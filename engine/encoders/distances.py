"""Relative position biases of attention scores.

A row of length L has 2 L - 1 distances (key minus query), from 1 - L to L - 1: one column each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from remora.engine.encoders.config import Disentangled, DistanceBias, EncoderConfig
from remora.engine.layers.norm import LayerNorm
from remora.engine.parallel.shard import Shard

Project = Callable[[Tensor], Tensor]
# The attention bias of one batch: from a layer and its queries and keys
# [rows, num_heads, L, head_dim] to values [rows or 1, num_heads, L, L] to add to the scores.
BatchBias = Callable[[int, Tensor, Tensor], Tensor]


class BucketTable:
    """A learned bias for each head and bucket, shared by all layers.

    scale:  factor on products of queries and keys; None = 1 / sqrt(head_dim)
    """

    scale: float | None = None

    def __init__(
        self, shape: DistanceBias, config: EncoderConfig, *, dtype: torch.dtype, device: str
    ) -> None:
        self.shape = shape
        self.name = config.names.distances
        self.table = torch.empty(shape.num_buckets, config.num_heads, dtype=dtype, device=device)

    def scores(self) -> BatchBias:
        """Return the bias of one batch, whose layers share it."""
        of_length = cache(self.of)
        return lambda layer, query, key: of_length(query.shape[2])

    def of(self, length: int) -> Tensor:
        """Return the bias [1, num_heads, L, L] of rows of that length."""
        each = self.table[bias_buckets(length, self.shape).to(self.table.device)]
        # Each query starts one distance earlier.
        return each.T.unfold(1, length, 1).flip(1).unsqueeze(0)

    def prepare(self, projections: Sequence[Project]) -> None:
        """Do nothing: the table needs no preparation."""

    def tensors(self) -> Iterator[tuple[str, Shard]]:
        """Yield the table."""
        yield f"{self.name}.weight", Shard.whole(self.table)


class StateTable:
    """A state for each bucket, as in DeBERTa-v2: https://arxiv.org/abs/2006.03654, equation 4."""

    def __init__(
        self, shape: Disentangled, config: EncoderConfig, *, dtype: torch.dtype, device: str
    ) -> None:
        self.shape = shape
        self.names = config.names
        self.num_heads = config.num_heads
        self.scale = 1 / math.sqrt(3 * config.head_dim)  # three products are added
        self.table = torch.empty(2 * shape.span, config.hidden_size, dtype=dtype, device=device)
        self.norm = None
        if config.names.distance_norm is not None:
            eps = config.norm_eps
            self.norm = LayerNorm(
                config.hidden_size, eps=eps, bias=True, dtype=dtype, device=device
            )
        self._of_layers: list[Tensor] = []

    def prepare(self, projections: Sequence[Project]) -> None:
        """Project the states; `projections` map [n, hidden] to q, k and v of each layer."""
        states = self.table if self.norm is None else self.norm(self.table)
        for project in projections:
            heads = project(states).view(len(states), 3, self.num_heads, -1)
            self._of_layers.append((heads[:, :2] * self.scale).permute(1, 2, 3, 0).contiguous())

    def scores(self) -> BatchBias:
        """Return the bias of one batch."""
        return self._scores

    def _scores(self, layer: int, query: Tensor, key: Tensor) -> Tensor:
        length = query.shape[2]
        entries = state_buckets(length, self.shape).to(query.device)
        # [num_heads, head_dim, 2 L - 1]
        queries, keys = self._of_layers[layer][..., entries]
        # Each query uses L adjacent columns, which start one column earlier than its predecessor's.
        found = _skewed(query @ keys)
        return found + _skewed(key @ queries.flip(2)).transpose(2, 3)

    def tensors(self) -> Iterator[tuple[str, Shard]]:
        """Yield the table and its norm."""
        yield f"{self.names.distances}.weight", Shard.whole(self.table)
        if self.norm is not None and self.names.distance_norm is not None:
            yield from self.norm.tensors(self.names.distance_norm)


Distances = BucketTable | StateTable


def make_distances(config: EncoderConfig, *, dtype: torch.dtype, device: str) -> Distances | None:
    """Return the relative positions of a family, if it has any."""
    match config.distances:
        case DistanceBias() as shape:
            return BucketTable(shape, config, dtype=dtype, device=device)
        case Disentangled() as shape:
            return StateTable(shape, config, dtype=dtype, device=device)
    return None


def _skewed(columns: Tensor) -> Tensor:
    """Return a view [..., L, L] of [..., L, 2 L - 1]: row i starts at column L - 1 - i."""
    *batch, length, width = columns.shape
    strides = [*columns.stride()[:-2], width - 1, 1]
    return columns.as_strided(
        [*batch, length, length], strides, columns.storage_offset() + length - 1
    )


def bias_buckets(length: int, shape: DistanceBias) -> Tensor:
    """Return the bucket of each distance [2 L - 1]; as in T5, later keys use the second half."""
    distances = torch.arange(1 - length, length)
    half = shape.num_buckets // 2
    exact = half // 2
    apart = distances.abs()
    grown = torch.log(apart.float() / exact) / math.log(shape.max_distance / exact)
    far = (exact + (grown * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(apart < exact, apart, far) + half * (distances > 0)


def state_buckets(length: int, shape: Disentangled) -> Tensor:
    """Return the entry of each distance [2 L - 1], with logarithmic buckets for large ones."""
    distances = torch.arange(length - 1, -length, -1)  # query minus key
    if shape.num_buckets:
        middle = shape.num_buckets // 2
        apart = distances.abs()
        reach = torch.log(torch.tensor((shape.max_distance - 1) / middle))
        grown = torch.log(apart.clamp(min=1) / middle) / reach * (middle - 1)
        far = (torch.ceil(grown) + middle).long() * distances.sign()
        distances = torch.where(apart <= middle, distances, far)
    return (distances + shape.span).clamp(0, 2 * shape.span - 1)
