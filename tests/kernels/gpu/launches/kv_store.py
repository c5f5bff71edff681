"""Launches of storing, as an 8B model's layers make them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from remora.kernels.kv_store import GREATEST, store_kv

TOKENS, PAGES, PAGE_SIZE, KV_HEADS, DIM = 64, 1000, 16, 8, 128


def launch(dtype: torch.dtype, stored: torch.dtype) -> None:
    heads = torch.empty((TOKENS, 6 * KV_HEADS, DIM), dtype=dtype, device="meta")
    pages = torch.empty((2, PAGES, PAGE_SIZE, KV_HEADS, DIM), dtype=stored, device="meta")
    scales = torch.empty(pages.shape[:4], dtype=torch.float32, device="meta")
    slots = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    key, value = heads[:, -2 * KV_HEADS : -KV_HEADS], heads[:, -KV_HEADS:]
    store_kv(key, value, pages, slots, scales if stored in GREATEST else None)


LAUNCHES: dict[str, Callable[[], object]] = {
    "bfloat16": lambda: launch(torch.bfloat16, torch.bfloat16),
    "float32": lambda: launch(torch.float32, torch.float32),
    "float16 int8": lambda: launch(torch.float16, torch.int8),
    "bfloat16 fp8": lambda: launch(torch.bfloat16, torch.float8_e4m3fn),
}
