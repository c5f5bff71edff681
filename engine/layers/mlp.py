"""Dense feed-forward layer, gated or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.layers.linear import Linear
from remora.engine.models.config import Activation, MLPConfig
from remora.engine.parallel.layout import WHOLE, Layout
from remora.engine.parallel.shard import Axis, Shard
from remora.kernels.activation import gelu_and_mul, silu_and_mul
from remora.kernels.lora import NO_GROUPS, RowGroups

Activate = Callable[[Tensor], Tensor]


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square_()


ACTIVATIONS: Mapping[Activation, Activate] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu2,
}
GATED: Mapping[Activation, Activate] = {
    "silu": silu_and_mul,
    "gelu": partial(gelu_and_mul, approximate="none"),
    "gelu_tanh": partial(gelu_and_mul, approximate="tanh"),
}


def _by_halves(activate: Activate, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate) * up


class MLP:
    """down(act(gate(x)) * up(x)), with gate and up fused, or down(act(up(x))) with up alone.

    Each rank computes a shard of the inner columns and a partial sum of the result.
    """

    def __init__(
        self,
        config: MLPConfig,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: str,
        layout: Layout = WHOLE,
    ) -> None:
        inner = Axis(config.size, layout.share(config.size))
        outer = Axis.whole(hidden_size)
        parts = {"gate_proj": inner, "up_proj": inner} if config.gated else {"up_proj": inner}
        linear = partial(Linear, dtype=dtype, device=device)
        self.gate_up_proj = linear(outer, parts, bias=config.bias)
        has_bias = config.bias and layout.tp_rank == 0
        self.down_proj = linear(inner, {"down_proj": outer}, bias=has_bias)
        self._activate = ACTIVATIONS[config.activation]
        if config.gated:
            gated = GATED.get(config.activation)
            self._activate = gated or partial(_by_halves, self._activate)

    def __call__(self, hidden: Tensor, adapters: RowGroups = NO_GROUPS) -> Tensor:
        """Apply to [num_tokens, hidden_size]."""
        return self.down_proj(self._activate(self.gate_up_proj(hidden, adapters)), adapters)

    @property
    def scales_with_up(self) -> bool:
        """Whether down_proj's inputs are proportional to up_proj's outputs, for factors above 0."""
        return "gate_proj" in self.gate_up_proj.parts or self._activate is F.relu

    def pack(self) -> None:
        """Pack the linears; see `Linear.pack`."""
        self.gate_up_proj.pack()
        self.down_proj.pack()

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yield the linear layers, each with the prefix of its parts' names."""
        yield prefix, self.gate_up_proj
        yield prefix, self.down_proj

    def tensors(self, prefix: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the shard of it that this rank holds."""
        yield from self.gate_up_proj.tensors(prefix)
        yield from self.down_proj.tensors(prefix)
