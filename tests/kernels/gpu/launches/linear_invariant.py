"""Launches of products with independent rows, as an 8B model's layers make them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from remora.kernels.linear_invariant import linear_invariant


def case(rows: int, dtype: torch.dtype) -> Callable[[], object]:
    x = torch.empty((rows, 4096), dtype=dtype, device="meta")
    weight = torch.empty((6144, 4096), dtype=dtype, device="meta")
    return lambda: linear_invariant(x, weight)


LAUNCHES: dict[str, Callable[[], object]] = {
    "bfloat16 decode": case(8, torch.bfloat16),
    "bfloat16 prefill": case(4096, torch.bfloat16),
    "float32": case(8, torch.float32),
}
