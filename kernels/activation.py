"""Gated activation over a fused gate and up projection."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up.

    gate_up:  [num_tokens, 2 * dim], the gate's columns first
    Returns a new tensor [num_tokens, dim].
    """
    return silu_and_mul_reference(gate_up)


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu_and_mul` in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
