"""Decides whether the Triton kernels of `gpu/` or torch compute on a tensor.

Knows device types and whether Triton is installed; knows no kernel.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

# Device types that Triton kernels serve.
TRITON_DEVICES = frozenset({"cuda"})


def by_triton(device: torch.device) -> bool:
    """Return whether Triton kernels compute on tensors of this device.

    False while torch.compile traces: it generates its own kernels from torch operations.
    """
    return device.type in TRITON_DEVICES and has_triton() and not torch.compiler.is_compiling()


@cache
def has_triton() -> bool:
    """Return whether Triton is installed; most GPU builds of torch include it."""
    return find_spec("triton") is not None
