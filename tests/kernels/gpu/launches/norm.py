"""Launches of norms: hidden states of an 8B, a 0.6B and a wide model, and heads in a projection."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from remora.kernels.norm import add_rms_norm, rms_norm


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def hidden(dim: int, dtype: torch.dtype) -> None:
    x, weight = empty(64, dim, dtype=dtype), empty(dim, dtype=dtype)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, empty(64, dim, dtype=dtype), weight, 1e-5)


def heads(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    projected = empty(64, 2 * num_heads, head_dim, dtype=dtype)
    rms_norm(projected[:, :num_heads], empty(head_dim, dtype=dtype), 1e-6)


def case(launch: Callable[..., None], *args: object) -> Callable[[], None]:
    return lambda: launch(*args)


LAUNCHES = {
    "1024 bfloat16": case(hidden, 1024, torch.bfloat16),
    "4096 bfloat16": case(hidden, 4096, torch.bfloat16),
    "16384 bfloat16": case(hidden, 16384, torch.bfloat16),
    "32768 float32": case(hidden, 32768, torch.float32),
    "4096 float16": case(hidden, 4096, torch.float16),
    "heads bfloat16": case(heads, 16, 128, torch.bfloat16),
}
