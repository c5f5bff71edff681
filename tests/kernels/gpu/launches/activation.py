"""Launches of gated activations, as an 8B model's layers make them."""

from __future__ import annotations

from functools import partial

import torch

from remora.kernels.activation import gelu_and_mul, silu_and_mul
from tests.kernels.gpu.devices import empty

BF16, FP16, FP32 = (
    empty(64, 2 * 14336, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)
)
LAUNCHES = {
    "silu bfloat16": partial(silu_and_mul, BF16),
    "silu float16": partial(silu_and_mul, FP16),
    "silu float32": partial(silu_and_mul, FP32),
    "gelu tanh bfloat16": partial(gelu_and_mul, BF16, "tanh"),
    "gelu erf bfloat16": partial(gelu_and_mul, BF16, "none"),
}
