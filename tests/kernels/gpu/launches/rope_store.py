"""Launches between projection and attention, with views of one projection."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from remora.kernels.kv_store import GREATEST, SCALE_DTYPE
from remora.kernels.rope_store import rotate_and_store
from tests.kernels.gpu.devices import empty

TOKENS = 64


def launch(
    num_heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    *,
    pairs: int | None = None,
    has_norms: bool = False,
    is_static: bool = False,
    **options: Any,
) -> None:
    heads = empty(TOKENS, num_heads + 2 * kv_heads, dim, dtype=dtype)
    angles = empty(TOKENS, pairs or dim // 2, dtype=dtype)
    pages = empty(2, 1000, 16, kv_heads, dim, dtype=stored)
    weight = empty(dim, dtype=dtype)
    query, key, value = heads.tensor_split((num_heads, num_heads + kv_heads), dim=1)
    rotate_and_store(
        query,
        key,
        value,
        angles,
        angles,
        pages,
        empty(TOKENS, dtype=torch.int64),
        scales=empty(*pages.shape[:4], dtype=SCALE_DTYPE) if stored in GREATEST else None,
        static_scales=empty(2, kv_heads, dtype=SCALE_DTYPE) if is_static else None,
        norms=(weight, weight) if has_norms else None,
        eps=1e-6,
        **options,
    )


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAUNCHES = {
    "llama 8B bfloat16": partial(launch, 32, 8, 128, BF16, BF16),
    "llama 8B float16 int8": partial(launch, 32, 8, 128, FP16, torch.int8),
    "qwen3 0.6B bfloat16": partial(launch, 16, 8, 128, BF16, BF16, has_norms=True),
    "qwen3 30B bfloat16 fp8": partial(
        launch, 32, 4, 128, BF16, torch.float8_e4m3fn, has_norms=True, is_static=True
    ),
    "qwen3 0.6B float32": partial(launch, 16, 8, 128, FP32, FP32, has_norms=True),
    "interleaved and partial bfloat16": partial(
        launch, 16, 4, 256, BF16, BF16, pairs=32, interleaved=True
    ),
}
