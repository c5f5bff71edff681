"""Attention whose K and V are made of a latent (multi-head latent attention, arXiv:2405.04434).

Of a token only the latent and one rotated key are kept, for all heads. The matrices that would make
K and V of latents are absorbed: queries are multiplied with the one before they attend, and what
they come to with the other, so that K and V are never made.

Of several ranks each computes its own heads, and one summand of the result; all of them make and
keep the same latents.

Legend: T tokens, N heads held, C elements of a latent, P elements that are rotated, D elements of a
head that are not, V elements of a head's value.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from remora.engine.layers.linear import Linear, allocate_weight
from remora.engine.layers.norm import RMSNorm
from remora.engine.models.config import DecoderConfig
from remora.engine.parallel.group import Group
from remora.engine.parallel.layout import WHOLE, Layout
from remora.engine.parallel.shard import Axis, Shard
from remora.engine.protocols import AttentionBackend
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope

NORM_EPS = 1e-6  # of the norms of what is narrow, whatever config.json says of the others


class LatentAttention:
    """Queries by one projection or by two with a norm between, latents by one with a norm.

    layer:    counted from the first one that this rank holds
    in_proj:  what reads the stream: queries, or what they are made of, then latent and rotated key
    unfold:   [N, D + V, C], of each head what makes keys of latents, then what makes values
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
        shape, latent = config.attention, config.attention.latent
        assert latent is not None
        self.layer = layer - layout.layers(config.num_layers).start
        self.config = latent
        self.interleaved = config.layers[layer].rope.interleaved
        self.spec = AttentionSpec(scale=shape.scale)
        self._heads = Axis(shape.num_heads, layout.share(shape.num_heads))
        self.num_heads = len(self._heads.held)
        outer = Axis.whole(config.hidden_size)
        query = self._heads.times(latent.key_size + latent.rotary_size)
        row = Axis.whole(latent.size + latent.rotary_size)
        first, self.q_norm, self.q_b_proj = {"q_proj": query}, None, None
        if latent.query_rank is not None:
            narrow = Axis.whole(latent.query_rank)
            first = {"q_a_proj": narrow}
            self.q_norm = RMSNorm(latent.query_rank, eps=NORM_EPS, dtype=dtype, device=device)
            self.q_b_proj = Linear(
                narrow, {"q_b_proj": query}, bias=False, dtype=dtype, device=device
            )
        self.in_proj = Linear(
            outer,
            {**first, "kv_a_proj_with_mqa": row},
            bias=shape.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.latent_norm = RMSNorm(latent.size, eps=NORM_EPS, dtype=dtype, device=device)
        self.unfold = allocate_weight(
            (self.num_heads, latent.key_size + latent.value_size, latent.size), dtype, device
        )
        self.o_proj = Linear(
            self._heads.times(latent.value_size),
            {"o_proj": outer},
            bias=shape.out_bias and layout.tp_rank == 0,
            dtype=dtype,
            device=device,
        )

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        attention: AttentionBackend,
        group: Group,
    ) -> Tensor:
        """Attend [T, hidden_size]; cos and sin are [T, P / 2]."""
        latent, unfold = self.config, self.unfold
        made = self.in_proj(hidden, batch.adapters)
        row_size = latent.size + latent.rotary_size
        query, row = made[:, :-row_size], made[:, -row_size:]
        if self.q_norm is not None and self.q_b_proj is not None:
            query = self.q_b_proj(self.q_norm(query), batch.adapters)
        query = query.reshape(len(hidden), self.num_heads, latent.key_size + latent.rotary_size)
        heads = hidden.new_empty(len(hidden), self.num_heads + 1, row_size)
        make_keys, make_values = unfold[:, : latent.key_size], unfold[:, latent.key_size :]
        plain = query[:, :, : latent.key_size].transpose(0, 1)
        heads[:, :-1, : latent.size] = torch.bmm(plain, make_keys).transpose(0, 1)
        heads[:, :-1, latent.size :] = query[:, :, latent.key_size :]
        heads[:, -1, : latent.size] = self.latent_norm(row[:, : latent.size])
        heads[:, -1, latent.size :] = row[:, latent.size :]
        norm_rope = QKNormRope(cos=cos, sin=sin, interleaved=self.interleaved)
        attended = attention.attend(self.layer, heads, norm_rope, batch, self.spec)
        values = torch.bmm(attended.transpose(0, 1), make_values.transpose(1, 2))
        return self.o_proj(values.transpose(0, 1).flatten(1), batch.adapters)

    def pack(self) -> None:
        """Pack the linears; see `Linear.pack`."""
        for linear in self.linears():
            linear.pack()

    def release(self) -> Tensor:
        """Hand `unfold` over to who computes with it; this layer no longer can."""
        unfold, self.unfold = self.unfold, self.unfold.new_empty(0)
        return unfold

    def linears(self) -> tuple[Linear, ...]:
        """Return its linear layers, the one that reads the stream first."""
        middle = () if self.q_b_proj is None else (self.q_b_proj,)
        return (self.in_proj, *middle, self.o_proj)

    def tensors(self, prefix: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the part of it that is held."""
        for linear in self.linears():
            yield from linear.tensors(prefix)
        if self.q_norm is not None:
            yield from self.q_norm.tensors(f"{prefix}q_a_layernorm")
        yield from self.latent_norm.tensors(f"{prefix}kv_a_layernorm")
        latent = self.config
        rows = self._heads.times(latent.key_size + latent.value_size)
        if len(rows.held) > 0:
            axes = (rows, Axis.whole(latent.size))
            yield f"{prefix}kv_b_proj.weight", Shard(memory=self.unfold.flatten(0, 1), axes=axes)
