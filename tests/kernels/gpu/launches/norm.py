"""Launches of norms: hidden states of an 8B, a 0.6B and a wide model, and heads in a projection."""

from __future__ import annotations

from functools import partial

import torch

from remora.kernels.norm import add_rms_norm, rms_norm
from tests.kernels.gpu.devices import empty


def hidden(dim: int, dtype: torch.dtype) -> None:
    x, weight = empty(64, dim, dtype=dtype), empty(dim, dtype=dtype)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, empty(64, dim, dtype=dtype), weight, 1e-5)


def heads(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    projected = empty(64, 2 * num_heads, head_dim, dtype=dtype)
    rms_norm(projected[:, :num_heads], empty(head_dim, dtype=dtype), 1e-6)


LAUNCHES = {
    "1024 bfloat16": partial(hidden, 1024, torch.bfloat16),
    "4096 bfloat16": partial(hidden, 4096, torch.bfloat16),
    "16384 bfloat16": partial(hidden, 16384, torch.bfloat16),
    "32768 float32": partial(hidden, 32768, torch.float32),
    "4096 float16": partial(hidden, 4096, torch.float16),
    "heads bfloat16": partial(heads, 16, 128, torch.bfloat16),
}
