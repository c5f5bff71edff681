"""Uploads a step's arrays to the device in one asynchronous copy.

The host may be a step ahead of the device, so it rotates between pinned buffers and reuses one only
after its copy is done. The device has one buffer: copies and kernels run in order. Arrays of the
same shapes always have the same device addresses, as captured graphs need. Knows nothing of what
the arrays mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remora.engine.graphs.device_stream import NUM_BUFFERS, DeviceStream, aligned

_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape and dtype of an array."""

    dims: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Shape:
        """Return those of an array."""
        return cls(array.shape, array.dtype)

    @property
    def num_bytes(self) -> int:
        """Size in bytes, without alignment."""
        return math.prod(self.dims) * self.dtype.itemsize


class Staging:
    """Buffers of `num_bytes`, on the host and on the device."""

    def __init__(self, stream: DeviceStream, num_bytes: int) -> None:
        self._stream = stream
        self._on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=stream.device)
        self._pinned = [stream.pinned(num_bytes) for _ in range(NUM_BUFFERS)]
        self._copied = [stream.event() for _ in self._pinned]
        self._next = 0

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        """Copy arrays to the device in stream order; returns them, valid until the next upload."""
        shapes = [Shape.of(array) for array in arrays]
        number, self._next = self._next, (self._next + 1) % NUM_BUFFERS
        self._copied[number].synchronize()
        here = self._pinned[number]
        whole = here.numpy()
        end = 0
        for array, (start, stop) in zip(arrays, _places(shapes, len(whole)), strict=True):
            whole[start:stop].view(array.dtype)[:] = array.ravel()
            end = stop
        self._stream.copy(self._on_device[:end], here[:end])
        self._copied[number].record()
        return self.views(shapes)

    def views(self, shapes: Sequence[Shape]) -> list[Tensor]:
        """Return the device tensors of uploaded arrays of these shapes."""
        return [
            self._on_device[start:stop].view(_DTYPES[shape.dtype]).view(shape.dims)
            for shape, (start, stop) in zip(
                shapes, _places(shapes, len(self._on_device)), strict=True
            )
        ]


def room_for(shapes: Sequence[Shape]) -> int:
    """Return the bytes that arrays of these shapes take together, aligned."""
    return sum(aligned(shape.num_bytes) for shape in shapes)


def _places(shapes: Sequence[Shape], num_bytes: int) -> list[tuple[int, int]]:
    """Return the byte range of each array. Raises ValueError when they do not fit."""
    if room_for(shapes) > num_bytes:
        raise ValueError(f"{room_for(shapes)} bytes do not fit into a buffer of {num_bytes}")
    places = []
    start = 0
    for shape in shapes:
        places.append((start, start + shape.num_bytes))
        start += room_for([shape])
    return places
