"""Whether a tensor is computed on by the kernels of gpu/ or by torch.

Knows kinds of devices and whether triton is there; knows no kernel.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

# Kinds of devices whose tensors go to triton's kernels, where there is triton.
TRITON_DEVICES = frozenset({"cuda"})


def by_triton(device: torch.device) -> bool:
    """Return whether triton's kernels compute on tensors of this device.

    Not while torch.compile reads the code: it makes kernels of its own of torch's operations.
    """
    return device.type in TRITON_DEVICES and has_triton() and not torch.compiler.is_compiling()


@cache
def has_triton() -> bool:
    """Whether kernels can be had; torch brings triton along on GPUs, mostly."""
    return find_spec("triton") is not None
