"""Memory for packed weights and buffers, in large pages where possible, and copies to a device."""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

SEGMENT_BYTES = 64 * 2**20
ALIGNMENT = 64
RING_BYTES = 32 * 2**20  # token masks of 256 rows and 150,000 tokens, several times


def allocate(num_bytes: int, *, large_pages: bool = False) -> Tensor:
    """Return zeroed bytes [num_bytes] uint8 that take no memory until they are written.

    large_pages:  request 2 MiB pages, which reduce TLB misses in sequential reads
    """
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def forget(tensor: Tensor) -> None:
    """Give a CPU tensor's memory back to the system; its address stays, and it reads as zeros.

    Bytes of pages that other memory shares are zeroed instead.
    """
    tensor.zero_() if tensor.nbytes < 2 * mmap.PAGESIZE else _forget_pages(tensor)


def _forget_pages(tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError("only contiguous memory can be given back")
    flat = tensor.reshape(-1).view(torch.uint8)
    first = -flat.data_ptr() % mmap.PAGESIZE
    num_bytes = (len(flat) - first) // mmap.PAGESIZE * mmap.PAGESIZE
    flat[:first].zero_()
    flat[first + num_bytes :].zero_()
    address = ctypes.c_void_p(flat.data_ptr() + first)
    if _libc().madvise(address, ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED) != 0:
        flat.zero_()


def trim() -> None:
    """Give the memory that the C library has freed and kept back to the system, on glibc."""
    libc = _libc()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


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


class Copied(Protocol):
    """An event after a copy to a device."""

    def record(self) -> Any:
        """Place the event after the copy."""

    def query(self) -> bool:
        """Return whether the copy is complete."""

    def synchronize(self) -> Any:
        """Wait for the copy."""


class PinnedRing:
    """Pinned memory that arrays are copied to a GPU from, part after part.

    Allocating it stops the device, so it is allocated once. A part is written again only after the
    copy from it is complete.

    buffer:      bytes [N] uint8
    make_event:  called for each copy
    """

    def __init__(self, buffer: Tensor, make_event: Callable[[], Copied]) -> None:
        self._buffer = buffer
        self._make_event = make_event
        self._next = 0
        self._used: deque[tuple[int, int, Copied]] = deque()  # start, stop; oldest first

    def fits(self, num_bytes: int) -> bool:
        """Return whether the ring holds several arrays of this size."""
        return num_bytes <= len(self._buffer) // 4

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy a contiguous tensor of the host to a device; `source` may change at once."""
        num_bytes = source.nbytes
        while self._used and self._used[0][2].query():
            self._used.popleft()
        start = self._next
        if start + num_bytes > len(self._buffer):
            self._wait(start, len(self._buffer))
            start = 0
        stop = start + num_bytes
        self._wait(start, stop)
        part = self._buffer[start:stop].view(source.dtype).view(source.shape)
        part.copy_(source)
        target.copy_(part, non_blocking=True)
        copied = self._make_event()
        copied.record()
        self._used.append((start, stop, copied))
        self._next = -(-stop // ALIGNMENT) * ALIGNMENT

    def _wait(self, start: int, stop: int) -> None:
        """Wait for the copies from a range at the ring's oldest end."""
        while self._used and self._used[0][0] < stop and start < self._used[0][1]:
            self._used.popleft()[2].synchronize()


@cache
def ring_of(device: torch.device) -> PinnedRing:
    """Return a GPU's ring. Only one thread at a time may use it."""
    buffer = torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True)
    return PinnedRing(buffer, torch.cuda.Event)


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device without waiting for it.

    A GPU copies asynchronously only from pinned memory; arrays too large for the ring are pinned
    one by one, and torch keeps them until the copy ends.
    """
    here = torch.from_numpy(array)
    if device.type != "cuda" or array.size == 0:
        return here.to(device)
    ring = ring_of(device)
    if not ring.fits(array.nbytes):
        return here.pin_memory().to(device, non_blocking=True)
    there = torch.empty(here.shape, dtype=here.dtype, device=device)
    ring.copy(here, there)
    return there


def is_bf16(tensor: Tensor) -> bool:
    """Return whether a bfloat16 or float32 tensor is bfloat16. Raises TypeError for others."""
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"expected a bfloat16 or float32 tensor, got {tensor.dtype}")
    return tensor.dtype == torch.bfloat16


def address_of(tensor: Tensor | None) -> int | None:
    """Return a tensor's address; None for None."""
    return None if tensor is None else tensor.data_ptr()
