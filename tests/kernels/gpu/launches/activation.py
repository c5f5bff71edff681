"""Launches of gated activations, as an 8B model's layers make them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from remora.kernels.activation import gelu_and_mul, silu_and_mul


def gate_up(dtype: torch.dtype) -> Tensor:
    return torch.empty((64, 2 * 14336), dtype=dtype, device="meta")


LAUNCHES: dict[str, Callable[[], object]] = {
    "silu bfloat16": lambda: silu_and_mul(gate_up(torch.bfloat16)),
    "silu float16": lambda: silu_and_mul(gate_up(torch.float16)),
    "silu float32": lambda: silu_and_mul(gate_up(torch.float32)),
    "gelu tanh bfloat16": lambda: gelu_and_mul(gate_up(torch.bfloat16), "tanh"),
    "gelu erf bfloat16": lambda: gelu_and_mul(gate_up(torch.bfloat16), "none"),
}
