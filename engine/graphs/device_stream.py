"""Copies between the host and an asynchronous device, and the moments of its work to wait for.

A device does its work in the order in which it was given. Host memory of copies is allocated once,
pinned where the device needs it, and reused in turn, so a step allocates none. Knows nothing of
what is copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16
NUM_BUFFERS = 3

Fetch = Callable[[], list[npt.NDArray[Any]]]


class Event(Protocol):
    """A moment in the device's work."""

    def record(self) -> object:
        """Place the event after all work that the device was given so far."""

    def synchronize(self) -> object:
        """Wait until the device reaches the event; return at once if it was never recorded."""


class DeviceStream(Protocol):
    """The work of one device, in order."""

    device: torch.device

    def event(self) -> Event:
        """Make an event."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate zeroed bytes [num_bytes] uint8 on the host, for copies without waiting."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between host and device, after the work before it and without waiting."""


class CudaStream:
    """DeviceStream of a GPU: torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def event(self) -> Event:
        """Make a CUDA event without timing."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate page-locked memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start a copy."""
        target.copy_(source, non_blocking=True)


class HostStream:
    """DeviceStream of a CPU in the device's place, which has done everything at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def event(self) -> Event:
        """Make an event that is always reached."""
        return _Reached()

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate ordinary memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy at once."""
        target.copy_(source)


class _Reached:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def stream_of(device: torch.device) -> DeviceStream:
    """Return the stream that torch's operations on the device use."""
    return CudaStream(device) if device.type == "cuda" else HostStream(device)


class Readback:
    """Copies results to the host, into buffers that are used again once their results are taken."""

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._free: defaultdict[int, list[tuple[Tensor, Event]]] = defaultdict(list)

    def start(self, tensors: Sequence[Tensor]) -> Fetch:
        """Start to copy tensors; returns a function that waits for the copies. Call it once."""
        num_bytes = 1 << sum(aligned(each.nbytes) for each in tensors).bit_length()
        free = self._free[num_bytes]
        buffer, copied = free.pop() if free else self._make(num_bytes)
        start, here = 0, []
        for tensor in tensors:
            part = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._stream.copy(part, tensor)
            here.append(part)
            start += aligned(tensor.nbytes)
        copied.record()

        def fetch() -> list[npt.NDArray[Any]]:
            copied.synchronize()
            results = [each.numpy().copy() for each in here]
            free.append((buffer, copied))
            return results

        return fetch

    def _make(self, num_bytes: int) -> tuple[Tensor, Event]:
        return self._stream.pinned(num_bytes), self._stream.event()


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of the alignment of arrays within a buffer."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
