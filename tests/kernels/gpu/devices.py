"""Where kernels are tested: interpreted on a CPU, or run on a GPU that is there.

    TRITON_INTERPRET=0 python -m pytest -m gpu tests/kernels/gpu

runs them on a GPU; without the variable they are interpreted, which needs none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="kernels are not interpreted")
    ),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
        ],
    ),
]
interpreted_only = pytest.mark.skipif(not INTERPRETED, reason="kernels are not interpreted")


def on_gpu(test: Callable[..., None]) -> Any:
    """Mark a test that runs on a GPU only."""
    is_absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    return pytest.mark.gpu(is_absent(test))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without memory, for launches that are only compiled."""
    return torch.empty(shape, dtype=dtype, device="meta")


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return memory for an output, filled with NaN: what a kernel leaves out shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what torch allocates within with NaN, or the greatest integer, also in the product."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
