"""Memory for packed weights and buffers: aligned, zero, in large pages where there are any."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

LARGE_PAGE = 2 * 2**20


def allocate(num_bytes: int, *, large_pages: bool = False) -> Tensor:
    """Return zeroed bytes [num_bytes] uint8 that take no memory until they are written to.

    large_pages:  ask for pages of 2 MiB, which spare address translations in what is read whole
    """
    size = max(num_bytes, 1)
    if large_pages:
        size = -(-size // LARGE_PAGE) * LARGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def buffer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate zeroed memory that costs nothing until it is used."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return allocate(num_bytes).view(dtype).view(shape)


def is_bf16(tensor: Tensor) -> bool:
    """Tell bfloat16 from float32. Raises TypeError for anything else."""
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"expected a bfloat16 or float32 tensor, got {tensor.dtype}")
    return tensor.dtype == torch.bfloat16
