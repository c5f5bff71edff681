"""The bytes of a layer's weights in host memory, and tensors over a copy of them on the device.

Knows tensors and bytes; knows nothing of layers, streams and the order of copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes, of each tensor
SMALLEST_CHUNK = 2**20

Allocate = Callable[[int], Tensor]  # bytes -> memory [bytes] uint8


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor within the bytes of a layer.

    start:   its first byte
    shape:   in the order of its memory
    order:   where each dimension of the tensor is in `shape`
    """

    start: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def within(self, memory: Tensor) -> Tensor:
        """Return the tensor over a layer's bytes [num_bytes] uint8."""
        flat = memory[self.start : self.start + self.num_bytes].view(self.dtype)
        return flat.view(self.shape).permute(self.order)


class HostWeights:
    """The weights of one layer.

    chunks:  host memory that holds them one after another
    """

    def __init__(self, tensors: Sequence[Tensor], allocate: Allocate) -> None:
        """Copy the tensors to host memory from `allocate`."""
        self.places: list[Placed] = []
        stored = [_in_memory_order(tensor) for tensor in tensors]
        end = 0
        for tensor, order in stored:
            place = Placed(end, tuple(tensor.shape), order, tensor.dtype)
            self.places.append(place)
            end = place.start + aligned(place.num_bytes)
        self.num_bytes = end
        self.chunks = [allocate(size) for size in chunk_sizes(end)]
        for place, (tensor, _) in zip(self.places, stored, strict=True):
            self._write(place.start, tensor.reshape(-1).view(torch.uint8))

    def tensors(self, memory: Tensor) -> Iterator[Tensor]:
        """Yield the tensors over a copy of the weights in memory [num_bytes or more] uint8."""
        for place in self.places:
            yield place.within(memory)

    def _write(self, start: int, source: Tensor) -> None:
        first = 0
        for chunk in self.chunks:
            begin, end = max(start, first), min(start + len(source), first + len(chunk))
            if begin < end:
                chunk[begin - first : end - first].copy_(source[begin - start : end - start])
            first += len(chunk)


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of the alignment of tensors."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def chunk_sizes(num_bytes: int) -> list[int]:
    """Return sizes of memory for `num_bytes`, descending powers of two and less than one more.

    torch rounds page-locked memory up to a power of two, so one piece could take twice the bytes.
    """
    sizes = []
    while num_bytes >= SMALLEST_CHUNK:
        sizes.append(1 << num_bytes.bit_length() - 1)
        num_bytes -= sizes[-1]
    return [*sizes, num_bytes] if num_bytes else sizes


def _in_memory_order(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a tensor contiguous in the order of its memory, and its dimensions there."""
    strides = tensor.stride()
    by_stride = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    stored = tensor.permute(by_stride)
    if not stored.is_contiguous():  # parts of a larger tensor, or repeated elements
        stored, by_stride = tensor.contiguous(), list(range(tensor.ndim))
    return stored, tuple(by_stride.index(axis) for axis in range(tensor.ndim))
