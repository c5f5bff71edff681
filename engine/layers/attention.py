"""Self-attention of one decoder layer: projections, what turns heads, and the backend between."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from remora.engine.batch import ForwardBatch, Turn
from remora.engine.layers.linear import Linear
from remora.engine.layers.norm import RMSNorm
from remora.engine.models.config import DecoderConfig
from remora.engine.parallel.layout import WHOLE, Layout
from remora.engine.parallel.shard import Axis, Shard
from remora.engine.protocols import AttentionBackend


class SelfAttention:
    """Grouped-query attention with one fused projection to q, k and v.

    Of several ranks each computes its own heads, and one summand of the result.
    layer:  counted from the first one that this rank holds
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
        self.layer = layer - layout.layers(config.num_layers).start
        self.window = config.windows[layer]
        self.scale = config.head_dim**-0.5
        heads = Axis(config.num_heads, layout.share(config.num_heads))
        kv_heads = Axis(config.num_kv_heads, layout.kv_heads(config.num_kv_heads))
        self.num_heads = len(heads.held)
        self.num_kv_heads = len(kv_heads.held)
        self.head_dim = config.head_dim
        query, key_or_value = heads.times(self.head_dim), kv_heads.times(self.head_dim)
        self.qkv_proj = Linear(
            Axis.whole(config.hidden_size),
            {"q_proj": query, "k_proj": key_or_value, "v_proj": key_or_value},
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(
            query,
            {"o_proj": Axis.whole(config.hidden_size)},
            bias=config.attention_out_bias and layout.tp_rank == 0,
            dtype=dtype,
            device=device,
        )
        self.head_norms: tuple[RMSNorm, RMSNorm] | None = None
        if config.qk_norm:
            eps = config.norm_eps
            self.head_norms = (
                RMSNorm(self.head_dim, eps=eps, dtype=dtype, device=device),
                RMSNorm(self.head_dim, eps=eps, dtype=dtype, device=device),
            )

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        attention: AttentionBackend,
    ) -> Tensor:
        """Attend [num_tokens, hidden_size]; cos and sin are [num_tokens, head_dim / 2]."""
        heads = self.qkv_proj(hidden, batch.adapters).view(len(hidden), -1, self.head_dim)
        turn = Turn(cos=cos, sin=sin)
        if self.head_norms is not None:
            query_norm, key_norm = self.head_norms
            norms = query_norm.weight, key_norm.weight
            turn = Turn(cos=cos, sin=sin, norms=norms, eps=query_norm.eps)
        attended = attention.attend(
            self.layer, heads, turn, batch, scale=self.scale, window=self.window
        )
        return self.o_proj(attended.flatten(1), batch.adapters)

    def pack(self) -> None:
        """Pack the linears; see `Linear.pack`."""
        self.qkv_proj.pack()
        self.o_proj.pack()

    def linears(self) -> tuple[Linear, Linear]:
        """Return its linear layers."""
        return self.qkv_proj, self.o_proj

    def tensors(self, prefix: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the part of it that is held."""
        yield from self.qkv_proj.tensors(prefix)
        yield from self.o_proj.tensors(prefix)
        if self.head_norms is not None:
            yield from self.head_norms[0].tensors(f"{prefix}q_norm")
            yield from self.head_norms[1].tensors(f"{prefix}k_norm")
