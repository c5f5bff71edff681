"""Gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from remora.engine.layers.linear import Linear
from remora.engine.models.config import DecoderConfig
from remora.kernels.activation import silu_and_mul


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up fused."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: str) -> None:
        size = config.intermediate_size
        self.gate_up_proj = Linear(
            config.hidden_size,
            {"gate_proj": size, "up_proj": size},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )
        self.down_proj = Linear(
            size,
            {"down_proj": config.hidden_size},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Apply to [num_tokens, hidden_size]."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))

    def pack(self) -> None:
        """Pack the linears; see `Linear.pack`."""
        self.gate_up_proj.pack()
        self.down_proj.pack()

    def tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yield each checkpoint name and the tensor that it fills."""
        yield from self.gate_up_proj.tensors(prefix)
        yield from self.down_proj.tensors(prefix)
