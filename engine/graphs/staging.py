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

MAX_LAYOUTS = 256  # kept; steps with prompts hardly ever have the same shapes twice

_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
}

Arrays = list[npt.NDArray[Any]]
PaddedArrays = list[tuple[npt.NDArray[Any], float]]  # each with the value of its padding


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


@dataclass(frozen=True, slots=True)
class _Layout:
    """Views of arrays that are uploaded together: on the host, in each buffer, and on the device.

    num_bytes:  of all, aligned
    """

    here: tuple[Arrays, ...]
    there: list[Tensor]
    num_bytes: int


class Staging:
    """Buffers of `num_bytes`, on the host and on the device."""

    def __init__(self, stream: DeviceStream, num_bytes: int) -> None:
        self._stream = stream
        self._on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=stream.device)
        self._pinned = [stream.pinned(num_bytes) for _ in range(NUM_BUFFERS)]
        self._copied = [stream.event() for _ in self._pinned]
        self._next = 0
        self._layouts: dict[tuple[Shape, ...], _Layout] = {}
        self._riders: Arrays = []
        self._num_opened = 0
        self._opened = _Layout(tuple([] for _ in self._pinned), [], 0)

    def ride(self, arrays: Arrays) -> None:
        """Add arrays to the next upload, after its own; `arrived` then returns them."""
        self._riders = arrays

    def arrived(self) -> list[Tensor]:
        """Return the arrays that rode with the latest upload, valid until the next."""
        return self._opened.there[self._num_opened :]

    def open(self, shapes: Sequence[Shape]) -> Arrays:
        """Return views of the next buffer to write arrays of these shapes to; `send` follows."""
        self._num_opened = len(shapes)
        self._opened = self._layout((*shapes, *map(Shape.of, self._riders)))
        self._copied[self._next].synchronize()
        here = self._opened.here[self._next]
        for view, rider in zip(here[self._num_opened :], self._riders, strict=True):
            view[...] = rider
        self._riders = []
        return here[: self._num_opened]

    def upload_padded(self, shapes: Sequence[Shape], arrays: PaddedArrays) -> list[Tensor]:
        """Do what `upload` does with arrays padded to these shapes at their ends."""
        for view, (values, padding) in zip(self.open(shapes), arrays, strict=True):
            count = len(values)
            view[:count] = values
            view[count:] = padding
        return self.send()

    def send(self) -> list[Tensor]:
        """Copy the opened arrays to the device in stream order; valid until the next `send`."""
        number, self._next = self._next, (self._next + 1) % NUM_BUFFERS
        num_bytes = self._opened.num_bytes
        self._stream.copy(self._on_device[:num_bytes], self._pinned[number][:num_bytes])
        self._copied[number].record()
        return self._opened.there[: self._num_opened]

    def upload(self, arrays: Arrays) -> list[Tensor]:
        """Copy arrays to the device in stream order; returns them, valid until the next upload."""
        for view, array in zip(self.open([*map(Shape.of, arrays)]), arrays, strict=True):
            view[...] = array
        return self.send()

    def views(self, shapes: Sequence[Shape]) -> list[Tensor]:
        """Return the device tensors of uploaded arrays of these shapes."""
        return self._layout(tuple(shapes)).there

    def _layout(self, shapes: tuple[Shape, ...]) -> _Layout:
        layout = self._layouts.get(shapes)
        if layout is None:
            if len(self._layouts) == MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[shapes] = self._make_layout(shapes)
        return layout

    def _make_layout(self, shapes: tuple[Shape, ...]) -> _Layout:
        places = _places(shapes, len(self._on_device))
        return _Layout(
            here=tuple(
                [
                    buffer.numpy()[start:stop].view(shape.dtype).reshape(shape.dims)
                    for shape, (start, stop) in zip(shapes, places, strict=True)
                ]
                for buffer in self._pinned
            ),
            there=[
                self._on_device[start:stop].view(_DTYPES[shape.dtype]).view(shape.dims)
                for shape, (start, stop) in zip(shapes, places, strict=True)
            ],
            num_bytes=room_for(shapes),
        )


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
        start += aligned(shape.num_bytes)
    return places
