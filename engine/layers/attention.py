"""Self-attention of one decoder layer: projections, QK norms, RoPE, and the attention backend."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from remora.engine.layers.head_norm import HeadsNorm
from remora.engine.layers.linear import Linear
from remora.engine.layers.norm import RMSNorm
from remora.engine.models.config import DecoderConfig, QueryGrowth
from remora.engine.parallel.group import Group
from remora.engine.parallel.layout import WHOLE, Layout
from remora.engine.parallel.shard import Axis, Shard
from remora.engine.protocols import AttentionBackend
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope


class SelfAttention:
    """Grouped-query attention with one fused projection to q, k and v.

    Each rank computes its own heads and a partial sum of the result.
    layer:        counted from this rank's first layer
    head_norms:   norms of queries and keys that the backend applies
    other_norms:  norms of queries and keys that this layer applies
    norm_names:   of either in checkpoints; None = not stored there
    growth:       of its queries; None = they do not grow
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: str,
        layout: Layout = WHOLE,
    ) -> None:
        shape = config.attention
        self.layer = layer - layout.layers(config.num_layers).start
        self._heads = Axis(shape.num_heads, layout.share(shape.num_heads))
        self._kv_heads = Axis(shape.num_kv_heads, layout.kv_heads(shape.num_kv_heads))
        self.num_heads = len(self._heads.held)
        self.num_kv_heads = len(self._kv_heads.held)
        self.head_dim = shape.head_dim
        self.interleaved = config.layers[layer].rope.interleaved
        query, key_or_value = (axis.times(self.head_dim) for axis in (self._heads, self._kv_heads))
        linear, outer = partial(Linear, dtype=dtype, device=device), Axis.whole(config.hidden_size)
        parts = {"q_proj": query, "k_proj": key_or_value, "v_proj": key_or_value}
        self.qkv_proj = linear(outer, parts, bias=shape.qkv_bias)
        has_bias = shape.out_bias and layout.tp_rank == 0
        self.o_proj = linear(query, {"o_proj": outer}, bias=has_bias)
        self._rotates = config.layers[layer].rope.kind != "none"
        growth = shape.growth
        self.growth = None if growth and growth.unrotated_only and self._rotates else growth
        self.spec = self._make_spec(config, layer, device)
        self._make_norms(config, layout, dtype, device)

    def _make_spec(self, config: DecoderConfig, layer: int, device: str) -> AttentionSpec:
        shape, held = config.attention, self._heads.held
        sinks = torch.empty(len(held), dtype=torch.float32, device=device) if shape.sinks else None
        slopes = None
        if shape.alibi is not None:
            every = alibi_slopes(shape.num_heads)[held.start : held.stop]
            slopes = (every * shape.alibi).to(device)
        return AttentionSpec(
            scale=shape.scale,
            window=config.layers[layer].window,
            both_ways=shape.both_ways,
            chunked=config.layers[layer].chunked,
            soft_cap=shape.soft_cap,
            sinks=sinks,
            slopes=slopes,
        )

    def _make_norms(
        self, config: DecoderConfig, layout: Layout, dtype: torch.dtype, device: str
    ) -> None:
        self.norm_names: tuple[str, str] | None = None
        self.head_norms: tuple[RMSNorm, RMSNorm] | None = None
        self.other_norms: tuple[HeadsNorm, HeadsNorm] | None = None
        chosen = config.attention.head_norm
        if chosen is None or (chosen.rotated_only and not self._rotates):
            return
        self.norm_names = (chosen.query, chosen.key) if chosen.weighted else None
        if chosen.is_plain:
            eps, offset = chosen.norm.eps, chosen.norm.offset
            query, key = (
                RMSNorm(self.head_dim, eps=eps, offset=offset, dtype=dtype, device=device)
                for _ in range(2)
            )
            self.head_norms = query, key
            if not chosen.weighted:
                query.weight.fill_(1.0)
                key.weight.fill_(1.0)
            return
        copies = max(1, layout.tp_size // config.num_kv_heads)
        of_query, of_key = (
            HeadsNorm(chosen, heads, self.head_dim, copies=count, dtype=dtype, device=device)
            for heads, count in ((self._heads, 1), (self._kv_heads, copies))
        )
        self.other_norms = of_query, of_key

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        attention: AttentionBackend,
        group: Group,
    ) -> Tensor:
        """Attend [num_tokens, hidden_size]; cos and sin are [num_tokens, pairs]."""
        heads = self.qkv_proj(hidden, batch.adapters).view(len(hidden), -1, self.head_dim)
        if self.growth is not None:
            # In place; a factor commutes with the rotation.
            factors = growth_factors(self.growth, batch.positions).to(heads.dtype)
            heads[:, : self.num_heads] *= factors[:, None, None]
        if self.other_norms is not None:
            heads = self._normalize(heads, self.other_norms, group)
        if self.head_norms is None:
            norm_rope = QKNormRope(cos=cos, sin=sin, interleaved=self.interleaved)
        else:
            query_norm, key_norm = self.head_norms
            norms = query_norm.weight, key_norm.weight
            norm_rope = QKNormRope(
                cos=cos, sin=sin, interleaved=self.interleaved, norms=norms, eps=query_norm.eps
            )
        attended = attention.attend(self.layer, heads, norm_rope, batch, self.spec)
        return self.o_proj(attended.flatten(1), batch.adapters)

    def _normalize(self, heads: Tensor, norms: tuple[HeadsNorm, HeadsNorm], group: Group) -> Tensor:
        first_value = self.num_heads + self.num_kv_heads
        query = norms[0](heads[:, : self.num_heads], group)
        key = norms[1](heads[:, self.num_heads : first_value], group)
        return torch.cat((query, key, heads[:, first_value:]), dim=1)

    def pack(self) -> None:
        """Pack the linears; see `Linear.pack`."""
        self.qkv_proj.pack()
        self.o_proj.pack()

    def linears(self) -> tuple[Linear, Linear]:
        """Return the linear layers, the input projection first."""
        return self.qkv_proj, self.o_proj

    def tensors(self, prefix: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the shard of it that this rank holds."""
        yield from self.qkv_proj.tensors(prefix)
        yield from self.o_proj.tensors(prefix)
        for norms in (self.head_norms, self.other_norms):
            if norms is not None and self.norm_names is not None:
                yield from norms[0].tensors(f"{prefix}{self.norm_names[0]}")
                yield from norms[1].tensors(f"{prefix}{self.norm_names[1]}")
        if self.spec.sinks is not None:
            yield f"{prefix}sinks", Shard(memory=self.spec.sinks, axes=(self._heads,))


def growth_factors(growth: QueryGrowth, positions: Tensor) -> Tensor:
    """Return the factors on queries at positions [n], [n] float32."""
    periods = (positions + growth.offset).div(growth.period, rounding_mode="floor")
    return 1 + growth.rate * torch.log(1 + periods)


def alibi_slopes(num_heads: int) -> Tensor:
    """Return each head's slope, by which scores fall with distance (ALiBi, arXiv:2108.12409).

    A geometric series for a power of two; further heads take every second slope of the next series.
    """
    closest = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (head + 1) / closest) for head in range(closest)]
    slopes += [2.0 ** (-4 * (2 * at + 1) / closest) for at in range(num_heads - closest)]
    return torch.tensor(slopes)
