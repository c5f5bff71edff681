"""Launches of extending attention: shapes of Llama-3.1-8B, of a model with heads of 256 and of one
with heads of 64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remora.kernels.attention.prefill import attend_extend

TOKENS, ROWS, PAGE_SIZE, NUM_PAGES = 8192, 8, 16, 4096


def launch(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    *,
    with_sinks: bool = False,
    **options: Any,
) -> None:
    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pages = (2, NUM_PAGES, PAGE_SIZE, num_kv_heads)
    scales = empty(*pages, dtype=torch.float32) if kv_dtype is not None else None
    attend_extend(
        empty(TOKENS, num_heads, head_dim, dtype=dtype),
        empty(*pages, head_dim, dtype=kv_dtype or dtype),
        empty(ROWS, 512, dtype=torch.int32),
        empty(ROWS + 1, dtype=torch.int32),
        empty(ROWS, dtype=torch.int32),
        kv_scales=scales,
        sinks=empty(num_heads, dtype=torch.float32) if with_sinks else None,
        **{"scale": 0.1, "window": None, **options},
    )


def case(*shape: Any, **options: Any) -> Callable[[], None]:
    return lambda: launch(*shape, **options)


LAUNCHES = {
    "heads of 128": case(32, 8, 128, torch.bfloat16),
    "heads of 128, float32": case(32, 8, 128, torch.float32),
    "heads of 128, int8": case(32, 8, 128, torch.bfloat16, torch.int8),
    "heads of 64": case(14, 2, 64, torch.float16),
    "heads of 64, sinks": case(64, 8, 64, torch.bfloat16, with_sinks=True),
    "heads of 256, capped, window": case(8, 4, 256, torch.bfloat16, soft_cap=50.0, window=4096),
}
