"""Multi-head latent attention (arXiv:2405.04434): K and V are functions of one latent per token.

The KV cache holds only the latent and one rotated key per token, for all heads. The matrices that
map latents to K and V are absorbed: one is applied to queries before attention, the other to the
attention's result, so that K and V are never materialised.

Each rank computes its own heads and a partial sum of the result; all ranks hold the same latents.

Legend: T tokens, N heads of this rank, C latent size, P rotated elements, D unrotated elements of a
head, V elements of a head's value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property, partial

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

NORM_EPS = 1e-6  # of the norms of latents, independent of rms_norm_eps in config.json


class LatentAttention:
    """Queries by one projection, or by two with a norm between; latents by one with a norm.

    layer:    counted from this rank's first layer
    in_proj:  projects the stream to queries (or their narrow form), the latent and the rotated key
    weight_device: where `unfold` is loaded
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
        self.dtype, self.weight_device = dtype, device
        self.interleaved = config.layers[layer].rope.interleaved
        self.spec = AttentionSpec(scale=shape.scale)
        self._heads = Axis(shape.num_heads, layout.share(shape.num_heads))
        self.num_heads = len(self._heads.held)
        linear, outer = partial(Linear, dtype=dtype, device=device), Axis.whole(config.hidden_size)
        query = self._heads.times(latent.key_size + latent.rotary_size)
        row = Axis.whole(latent.size + latent.rotary_size)
        first, self.q_norm, self.q_b_proj = {"q_proj": query}, None, None
        if latent.query_rank is not None:
            narrow = Axis.whole(latent.query_rank)
            first = {"q_a_proj": narrow}
            self.q_norm = RMSNorm(latent.query_rank, eps=NORM_EPS, dtype=dtype, device=device)
            self.q_b_proj = linear(narrow, {"q_b_proj": query}, bias=False)
        self.in_proj = linear(outer, {**first, "kv_a_proj_with_mqa": row}, bias=shape.qkv_bias)
        self.latent_norm = RMSNorm(latent.size, eps=NORM_EPS, dtype=dtype, device=device)
        values, has_bias = self._heads.times(latent.value_size), shape.out_bias
        self.o_proj = linear(values, {"o_proj": outer}, bias=has_bias and layout.tp_rank == 0)

    @cached_property
    def unfold(self) -> Tensor:
        """[N, D + V, C], maps latents to each head's keys, then values; allocated at first use."""
        latent = self.config
        shape = self.num_heads, latent.key_size + latent.value_size, latent.size
        return allocate_weight(shape, self.dtype, self.weight_device)

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

    def weight_tensors(self) -> list[Tensor]:
        """Return `unfold`."""
        return [self.unfold]

    def set_weight_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replace `unfold`."""
        (self.unfold,) = tensors

    def pack(self) -> None:
        """Pack the linears; see `Linear.pack`."""
        for linear in self.linears():
            linear.pack()

    def release(self) -> Tensor:
        """Return `unfold` and drop it; the layer cannot compute afterwards."""
        unfold, self.unfold = self.unfold, self.unfold.new_empty(0)
        return unfold

    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers, the input projection first."""
        middle = () if self.q_b_proj is None else (self.q_b_proj,)
        return (self.in_proj, *middle, self.o_proj)

    def tensors(self, prefix: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the shard of it that this rank holds."""
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
