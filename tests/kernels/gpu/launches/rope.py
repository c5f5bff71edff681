"""Launches of rotations: all heads of an 8B model, and the forms that other models have."""

from __future__ import annotations

from functools import partial

import torch

from remora.kernels.rope import apply_rope
from tests.kernels.gpu.devices import empty


def launch(
    num_heads: int, dim: int, pairs: int, dtype: torch.dtype, *, interleaved: bool = False
) -> None:
    fused, angles = empty(64, num_heads + 8, dim, dtype=dtype), empty(64, pairs, dtype=dtype)
    apply_rope(fused[:, :num_heads], angles, angles, interleaved=interleaved)


LAUNCHES = {
    "llama 8B bfloat16": partial(launch, 40, 128, 64, torch.bfloat16),
    "llama 8B float32": partial(launch, 40, 128, 64, torch.float32),
    "interleaved float16": partial(launch, 16, 64, 32, torch.float16, interleaved=True),
    "partial bfloat16": partial(launch, 32, 80, 16, torch.bfloat16),
    "wide bfloat16": partial(launch, 8, 256, 128, torch.bfloat16),
}
