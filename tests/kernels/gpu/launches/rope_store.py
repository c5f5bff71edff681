"""Launches between projection and attention, with views of one projection."""

from __future__ import annotations

from collections.abc import Callable

import torch

from remora.kernels.kv_store import GREATEST
from remora.kernels.rope_store import rotate_and_store

TOKENS, PAGES, PAGE_SIZE = 64, 1000, 16


def launch(
    num_heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    *,
    pairs: int | None = None,
    has_norms: bool = False,
    interleaved: bool = False,
) -> None:
    heads = torch.empty((TOKENS, num_heads + 2 * kv_heads, dim), dtype=dtype, device="meta")
    angles = torch.empty((TOKENS, pairs or dim // 2), dtype=dtype, device="meta")
    pages = torch.empty((2, PAGES, PAGE_SIZE, kv_heads, dim), dtype=stored, device="meta")
    scales = torch.empty(pages.shape[:4], dtype=torch.float32, device="meta")
    weight = torch.empty(dim, dtype=dtype, device="meta")
    kv = heads[:, num_heads:]
    rotate_and_store(
        heads[:, :num_heads],
        kv[:, :kv_heads],
        kv[:, kv_heads:],
        angles,
        angles,
        pages,
        torch.empty(TOKENS, dtype=torch.int64, device="meta"),
        scales=scales if stored in GREATEST else None,
        norms=(weight, weight) if has_norms else None,
        eps=1e-6,
        interleaved=interleaved,
    )


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn
LAUNCHES: dict[str, Callable[[], object]] = {
    "llama 8B bfloat16": lambda: launch(32, 8, 128, BF16, BF16),
    "llama 8B float16 int8": lambda: launch(32, 8, 128, FP16, torch.int8),
    "qwen3 0.6B bfloat16": lambda: launch(16, 8, 128, BF16, BF16, has_norms=True),
    "qwen3 30B bfloat16 fp8": lambda: launch(32, 4, 128, BF16, FP8, has_norms=True),
    "qwen3 0.6B float32": lambda: launch(16, 8, 128, FP32, FP32, has_norms=True),
    "interleaved and partial bfloat16": lambda: launch(
        16, 4, 256, BF16, BF16, pairs=32, interleaved=True
    ),
}
