"""Memory for packed weights and buffers, in large pages where possible, and copies to a device."""

from __future__ import annotations

import mmap
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

SEGMENT_BYTES = 64 * 2**20
ALIGNMENT = 64


def allocate(num_bytes: int, *, large_pages: bool = False) -> Tensor:
    """Return zeroed bytes [num_bytes] uint8 that take no memory until they are written.

    large_pages:  request 2 MiB pages, which reduce TLB misses in sequential reads
    """
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


class Arena:
    """Allocator of memory with one common lifetime, in large pages."""

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return zeroed bytes [num_bytes] uint8, aligned to 64."""
        aligned = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if aligned > len(self._rest):
            self._rest = allocate(max(aligned, self._segment_bytes), large_pages=True)
        taken, self._rest = self._rest[:num_bytes], self._rest[aligned:]
        return taken


def buffer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a zeroed tensor that takes no memory until it is written."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return allocate(num_bytes).view(dtype).view(shape)


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device without waiting for it.

    A GPU copies asynchronously only from pinned memory, which torch keeps until the copy ends.
    """
    here = torch.from_numpy(array)
    if device.type != "cuda" or array.size == 0:
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)


def is_bf16(tensor: Tensor) -> bool:
    """Return whether a bfloat16 or float32 tensor is bfloat16. Raises TypeError for others."""
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"expected a bfloat16 or float32 tensor, got {tensor.dtype}")
    return tensor.dtype == torch.bfloat16


def address_of(tensor: Tensor | None) -> int | None:
    """Return a tensor's address; None for None."""
    return None if tensor is None else tensor.data_ptr()
