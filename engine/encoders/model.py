"""The encoder model, for all families: they differ only in their `EncoderConfig`.

Knows layers and the order of their parts. Knows nothing of files and of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.encoders.attention import BatchAttention
from remora.engine.encoders.config import EncoderConfig
from remora.engine.encoders.distances import make_distances
from remora.engine.layers.linear import Linear
from remora.engine.layers.mlp import ACTIVATIONS
from remora.engine.layers.norm import LayerNorm
from remora.engine.parallel.shard import Axis, Shard
from remora.engine.pooling.rows import RowBatch

Attend = Callable[[Tensor], Tensor]


class EncoderLayer:
    """Attention and MLP, each with a residual connection and a norm before or after it."""

    def __init__(
        self, config: EncoderConfig, layer: int, *, dtype: torch.dtype, device: str
    ) -> None:
        size, inner, names = config.hidden_size, config.intermediate_size, config.names
        self.config = config
        self.activate = ACTIVATIONS[config.activation]

        def linear(inputs: int, parts: tuple[str, ...], outputs: int, bias: bool) -> Linear:
            each = Axis.whole(outputs // len(parts))
            axes = dict.fromkeys(parts, each)
            return Linear(Axis.whole(inputs), axes, bias=bias, dtype=dtype, device=device)

        def norm() -> LayerNorm:
            eps, bias = config.norm_eps, config.norm_bias
            return LayerNorm(size, eps=eps, bias=bias, dtype=dtype, device=device)

        down_bias = config.mlp_bias if config.down_bias is None else config.down_bias
        self.qkv = linear(size, names.qkv, 3 * size, config.attention_bias)
        self.out = linear(size, (names.out,), size, config.attention_bias)
        self.up = linear(size, names.up, inner * (1 + config.is_gated), config.mlp_bias)
        self.down = linear(inner, (names.down,), size, down_bias)
        has_norm = layer > 0 or not config.skips_first_norm
        self.attention_norm = norm() if has_norm else None
        self.mlp_norm = norm()

    def __call__(self, stream: Tensor, attend: Attend) -> Tensor:
        """Return the residual stream [T, hidden_size] after this layer.

        attend:  from q, k and v [T, 3, num_heads, head_dim] to the output [T, hidden_size]
        """
        if self.config.norms_first:
            normed = stream if self.attention_norm is None else self.attention_norm(stream)
            stream = self._attend(normed, attend).add_(stream)
            return self._feed(self.mlp_norm(stream)).add_(stream)
        assert self.attention_norm is not None
        stream = self.attention_norm(self._attend(stream, attend).add_(stream))
        return self.mlp_norm(self._feed(stream).add_(stream))

    def _attend(self, hidden: Tensor, attend: Attend) -> Tensor:
        heads = self.qkv(hidden).view(-1, 3, self.config.num_heads, self.config.head_dim)
        return self.out(attend(heads))

    def _feed(self, hidden: Tensor) -> Tensor:
        inner = self.up(hidden)
        if not self.config.is_gated:
            return self.down(self.activate(inner))
        active, gate = inner.chunk(2, dim=-1)
        if self.config.activates_last:
            active, gate = gate, active
        return self.down(self.activate(active).mul_(gate))

    def pack(self) -> None:
        """Pack the linears; see `Linear.pack`."""
        for linear in (self.qkv, self.out, self.up, self.down):
            linear.pack()

    def tensors(self, prefix: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the memory that it fills."""
        names = self.config.names
        for linear in (self.qkv, self.out, self.up, self.down):
            yield from linear.tensors(prefix)
        if self.attention_norm is not None:
            yield from self.attention_norm.tensors(prefix + names.attention_norm)
        yield from self.mlp_norm.tensors(prefix + names.mlp_norm)


class EncoderModel:
    """An encoder. Fill its weights through `tensors`, then call `pack` once."""

    def __init__(self, config: EncoderConfig, *, dtype: torch.dtype, device: str) -> None:
        self.config = config
        self.dtype = dtype
        self.hidden_size = config.hidden_size
        size = config.embedding_size or config.hidden_size

        def table(entries: int) -> Tensor:
            return torch.empty(entries, size, dtype=dtype, device=device)

        def norm(of: int) -> LayerNorm:
            eps, bias = config.norm_eps, config.norm_bias
            return LayerNorm(of, eps=eps, bias=bias, dtype=dtype, device=device)

        names = config.names
        self.words = table(config.vocab_size)
        self.positions = None
        if names.positions is not None:
            self.positions = table(config.max_position + config.position_offset)
        self.types = (
            None if names.types is None or not config.num_types else table(config.num_types)
        )
        self.embedding_norm = norm(size)
        self.projection = None
        if names.projection is not None:
            parts = {names.projection: Axis.whole(config.hidden_size)}
            self.projection = Linear(Axis.whole(size), parts, bias=True, dtype=dtype, device=device)
        self.distances = make_distances(config, dtype=dtype, device=device)
        self.layers = [
            EncoderLayer(config, layer, dtype=dtype, device=device)
            for layer in range(1 if config.one_layer else config.num_layers)
        ]
        self.final_norm = None if names.final_norm is None else norm(config.hidden_size)

    @torch.inference_mode()
    def forward(self, rows: RowBatch) -> Tensor:
        """Return the final hidden states [T, hidden_size]."""
        stream = self._embed(rows)
        attention = BatchAttention(self.config, rows, self.distances, self.dtype)
        for number in range(self.config.num_layers):
            layer = self.layers[0 if self.config.one_layer else number]
            stream = layer(stream, partial(attention, number))
        return stream if self.final_norm is None else self.final_norm(stream)

    def _embed(self, rows: RowBatch) -> Tensor:
        stream = F.embedding(rows.token_ids, self.words)
        if self.positions is not None:
            stream = stream + F.embedding(
                rows.positions + self.config.position_offset, self.positions
            )
        if self.types is not None:
            types = rows.types.clamp(max=self.config.num_types - 1)
            stream = stream + F.embedding(types, self.types)
        stream = self.embedding_norm(stream)
        return stream if self.projection is None else self.projection(stream)

    @torch.inference_mode()
    def pack(self) -> None:
        """Pack all linears into the layout of the fastest kernels, after the weights are loaded."""
        for layer in self.layers:
            layer.pack()
        if self.distances is not None:
            self.distances.prepare([layer.qkv for layer in self.layers])

    def tensors(self) -> dict[str, Shard]:
        """Return checkpoint names, without a prefix, and the memory that they fill."""
        names = self.config.names
        found = {f"{names.words}.weight": Shard.whole(self.words)}
        if self.positions is not None:
            found[f"{names.positions}.weight"] = Shard.whole(self.positions)
        if self.types is not None:
            found[f"{names.types}.weight"] = Shard.whole(self.types)
        found.update(self.embedding_norm.tensors(names.embedding_norm))
        if self.projection is not None:
            found.update(self.projection.tensors(""))
        if self.distances is not None:
            found.update(self.distances.tensors())
        for number, layer in enumerate(self.layers):
            found.update(layer.tensors(names.layer.format(number)))
        if self.final_norm is not None and names.final_norm is not None:
            found.update(self.final_norm.tensors(names.final_norm))
        return found
