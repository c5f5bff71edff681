"""Weights, inputs and schemes for tests of rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from remora.engine.quantise.search import Scheme

SCHEMES = tuple(
    Scheme(bits=bits, group_size=size, symmetric=symmetric, scale_dtype=dtype)
    for bits, size, symmetric, dtype in (
        (4, 32, False, torch.bfloat16),
        (4, 64, True, torch.float16),
        (8, 32, True, torch.bfloat16),
        (8, 32, False, torch.float32),
    )
)


def some_weight(outputs: int, inputs: int, seed: int) -> Tensor:
    """Return normal weights with a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.02
    is_outlier = torch.rand(outputs, inputs, generator=generator) < 0.01
    return torch.where(is_outlier, weight * 8, weight)


def correlated_inputs(rows: int, inputs: int, seed: int) -> Tensor:
    """Return inputs of unequal size, most of which follow from a few causes."""
    generator = torch.Generator().manual_seed(seed)
    causes = torch.randn(rows, max(1, inputs // 8), generator=generator)
    mixed = causes @ torch.randn(causes.shape[1], inputs, generator=generator)
    own = torch.randn(rows, inputs, generator=generator) * 0.3
    return (mixed + own) * torch.rand(inputs, generator=generator).add(0.1)
