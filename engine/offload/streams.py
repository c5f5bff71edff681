"""Copies of weights to a device on a stream of their own, and the events that order them.

The steps' work and the copies are two streams; an event marks a moment of one, for which the other
waits. The host waits for nothing. Knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from remora.configs.errors import ConfigError

Event = Any  # made by the CopyStreams that it is given to


class CopyStreams(Protocol):
    """The stream of a device's steps, and the one that copies weights.

    device:  to which weights are copied
    """

    device: torch.device

    def event(self) -> Event:
        """Make an event, which may be recorded many times; the latest time counts."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate host memory [num_bytes] uint8 for copies that do not wait.

        Raises ConfigError.
        """

    def record(self, event: Event) -> None:
        """Record the event after all steps' work that was launched so far."""

    def copy(self, target: Tensor, sources: Sequence[Tensor], *, after: Event, done: Event) -> None:
        """Copy to the device once `after` is reached, and record `done` after that.

        target:   [num_bytes] uint8 on the device
        sources:  host memory, which fills the target in this order
        """

    def wait(self, event: Event) -> None:
        """Let the steps' work that is launched from now on wait for the event."""


class CudaCopies:
    """CopyStreams of a GPU: torch's current stream, which may be capturing a graph, and another.

    Copies join a capture by the events that they wait for and record, so a replay repeats them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def event(self) -> Event:
        """Make a CUDA event without timing."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate page-locked memory."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise ConfigError(
                f"offload: {num_bytes} bytes of host memory cannot be page-locked "
                f"({str(error).splitlines()[0]}); keep fewer layers there (offload.host_memory, "
                "offload.num_in_group), or raise the limit of locked memory (ulimit -l)"
            ) from error

    def record(self, event: Event) -> None:
        """Record on the current stream."""
        event.record()

    def copy(self, target: Tensor, sources: Sequence[Tensor], *, after: Event, done: Event) -> None:
        """Start copies on the other stream."""
        with torch.cuda.stream(self._side):
            after.wait()
            copy_parts(target, sources)
            done.record()

    def wait(self, event: Event) -> None:
        """Let the current stream wait."""
        event.wait()


class HostCopies:
    """CopyStreams of a CPU in the device's place, which copies at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def event(self) -> Event:
        """Make nothing."""
        return None

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate ordinary memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record(self, event: Event) -> None:
        """Do nothing: all work is done."""

    def copy(self, target: Tensor, sources: Sequence[Tensor], *, after: Event, done: Event) -> None:
        """Copy at once."""
        copy_parts(target, sources)

    def wait(self, event: Event) -> None:
        """Do nothing: all copies are done."""


def copies_to(device: torch.device) -> CopyStreams:
    """Return the streams of a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies(device)


def copy_parts(target: Tensor, sources: Sequence[Tensor]) -> None:
    """Copy sources to consecutive parts of the target, on the current stream without waiting."""
    start = 0
    for source in sources:
        target[start : start + len(source)].copy_(source, non_blocking=True)
        start += len(source)
