"""Gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from remora.engine.layers.linear import Linear
from remora.engine.models.config import DecoderConfig
from remora.engine.parallel.layout import WHOLE, Layout
from remora.engine.parallel.shard import Axis, Shard
from remora.kernels.activation import silu_and_mul
from remora.kernels.lora import NO_GROUPS, RowGroups


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up fused.

    Of several ranks each computes a share of the inner columns, and one summand of the result.
    """

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: str, layout: Layout = WHOLE
    ) -> None:
        inner = Axis(config.intermediate_size, layout.share(config.intermediate_size))
        outer = Axis.whole(config.hidden_size)
        self.gate_up_proj = Linear(
            outer,
            {"gate_proj": inner, "up_proj": inner},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )
        self.down_proj = Linear(
            inner,
            {"down_proj": outer},
            bias=config.mlp_bias and layout.tp_rank == 0,
            dtype=dtype,
            device=device,
        )

    def __call__(self, hidden: Tensor, adapters: RowGroups = NO_GROUPS) -> Tensor:
        """Apply to [num_tokens, hidden_size]."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden, adapters)), adapters)

    def pack(self) -> None:
        """Pack the linears; see `Linear.pack`."""
        self.gate_up_proj.pack()
        self.down_proj.pack()

    def linears(self) -> tuple[Linear, Linear]:
        """Return its linear layers."""
        return self.gate_up_proj, self.down_proj

    def tensors(self, prefix: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the part of it that is held."""
        yield from self.gate_up_proj.tensors(prefix)
        yield from self.down_proj.tensors(prefix)
