"""Launches of rotations: all heads of an 8B model, and the forms that other models have."""

from __future__ import annotations

from collections.abc import Callable

import torch

from remora.kernels.rope import apply_rope


def launch(
    num_heads: int, dim: int, pairs: int, dtype: torch.dtype, *, interleaved: bool = False
) -> None:
    fused = torch.empty((64, num_heads + 8, dim), dtype=dtype, device="meta")
    angles = torch.empty((64, pairs), dtype=dtype, device="meta")
    apply_rope(fused[:, :num_heads], angles, angles, interleaved=interleaved)


LAUNCHES: dict[str, Callable[[], object]] = {
    "llama 8B bfloat16": lambda: launch(40, 128, 64, torch.bfloat16),
    "llama 8B float32": lambda: launch(40, 128, 64, torch.float32),
    "interleaved float16": lambda: launch(16, 64, 32, torch.float16, interleaved=True),
    "partial bfloat16": lambda: launch(32, 80, 16, torch.bfloat16),
    "wide bfloat16": lambda: launch(8, 256, 128, torch.bfloat16),
}
