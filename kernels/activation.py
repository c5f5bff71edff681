"""Gated activation over a fused gate and up projection.

The activation is computed in float32 and rounded to the dtype before the product. With Triton the
kernel is that of `gpu/activation.py`, for float32, float16 and bfloat16.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.kernels.dispatch import by_triton


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up.

    gate_up:  [num_tokens, 2 * dim], the gate's columns first
    Returns a new tensor [num_tokens, dim].
    """
    if not by_triton(gate_up.device):
        return silu_and_mul_reference(gate_up)
    return _by_kernel(gate_up, "silu")


def gelu_and_mul(gate_up: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """Compute gelu(gate) * up, as `silu_and_mul`.

    approximate:  "none" is the error function, "tanh" its approximation, as in torch
    """
    if not by_triton(gate_up.device):
        return gelu_and_mul_reference(gate_up, approximate)
    return _by_kernel(gate_up, "gelu_tanh" if approximate == "tanh" else "gelu_erf")


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu_and_mul` in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul_reference(gate_up: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """`gelu_and_mul` in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)


def _by_kernel(gate_up: Tensor, gate: str) -> Tensor:
    from remora.kernels.gpu import activation as kernels

    num_tokens, width = gate_up.shape
    out = torch.empty((num_tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    kernels.activate_and_mul(gate_up, gate, out)
    return out
