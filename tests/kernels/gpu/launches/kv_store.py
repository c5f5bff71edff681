"""Launches of storing, as an 8B model's layers make them."""

from __future__ import annotations

from functools import partial

import torch

from remora.kernels.kv_store import GREATEST, SCALE_DTYPE, store_kv
from tests.kernels.gpu.devices import empty

TOKENS, KV_HEADS, DIM = 64, 8, 128


def launch(dtype: torch.dtype, stored: torch.dtype, *, is_static: bool = False) -> None:
    heads = empty(TOKENS, 6 * KV_HEADS, DIM, dtype=dtype)
    pages = empty(2, 1000, 16, KV_HEADS, DIM, dtype=stored)
    slots, scales = empty(TOKENS, dtype=torch.int64), empty(*pages.shape[:4], dtype=SCALE_DTYPE)
    key, value = heads[:, -2 * KV_HEADS : -KV_HEADS], heads[:, -KV_HEADS:]
    static_scales = empty(2, KV_HEADS, dtype=SCALE_DTYPE) if is_static else None
    store_kv(key, value, pages, slots, scales if stored in GREATEST else None, static_scales)


LAUNCHES = {
    "bfloat16": partial(launch, torch.bfloat16, torch.bfloat16),
    "float32": partial(launch, torch.float32, torch.float32),
    "float16 int8": partial(launch, torch.float16, torch.int8),
    "bfloat16 e4m3": partial(launch, torch.bfloat16, torch.float8_e4m3fn),
    "bfloat16 e4m3 static": partial(launch, torch.bfloat16, torch.float8_e4m3fn, is_static=True),
    "bfloat16 e5m2": partial(launch, torch.bfloat16, torch.float8_e5m2),
}
