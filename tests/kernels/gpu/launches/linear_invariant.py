"""Launches of products with independent rows, as an 8B model's layers make them."""

from __future__ import annotations

from functools import partial

import torch

from remora.kernels.linear_invariant import linear_invariant
from tests.kernels.gpu.devices import empty

LAUNCHES = {
    name: partial(linear_invariant, empty(rows, 4096, dtype=dtype), empty(6144, 4096, dtype=dtype))
    for name, rows, dtype in (
        ("bfloat16 decode", 8, torch.bfloat16),
        ("bfloat16 prefill", 4096, torch.bfloat16),
        ("float32", 8, torch.float32),
    )
}
