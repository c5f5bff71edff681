"""How far two computations of the same model may differ, from dtype, depth and magnitude.

A tolerance that is read off one machine fails on the next one, whose library sums in another order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

# A layer rounds what it stores about twice to the model's dtype: after attention and after the MLP.
STORED = 2
# It sums in at least float32. The order of n terms changes a sum by about eps * sqrt(n), 16 for the
# 256 terms of a small model; 32 leaves room for two programs that each round in their own order.
SUMMED = 32


def parity_tolerance(dtype: torch.dtype, num_layers: int, magnitude: float) -> float:
    """Return the absolute difference that rounding alone explains.

    Each layer adds errors of its stored values and of its sums, both relative to the largest value
    that passes through it; the errors of `num_layers` layers add up at worst:
    `num_layers * magnitude * (STORED * eps(dtype) + SUMMED * eps(accumulator))`.
    A real defect (a wrong mask, norm or position) is some orders of magnitude larger.

    magnitude:  the largest absolute value that is compared
    """
    stored = torch.finfo(dtype).eps
    summed = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return num_layers * magnitude * (STORED * stored + SUMMED * summed)


def near(wanted: Any, num_layers: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return a value equal to the tensor or array `wanted` up to the rounding of the layers."""
    values = torch.as_tensor(wanted).to(torch.promote_types(dtype, torch.float32))
    magnitude = float(values.abs().max()) if values.numel() else 0.0
    return pytest.approx(values.numpy(), abs=parity_tolerance(dtype, num_layers, magnitude), rel=0)
