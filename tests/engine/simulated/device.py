"""A device that does nothing and takes as long as a GPU would: for measuring whether it waits.

It replaces what only a GPU can do: the model's arithmetic, the kernels that choose tokens, graphs,
copies and events. All else is the engine's own. The host's time is the wall-clock time of its
thread. Time jumps over waits instead of sleeping through them: an operating system wakes a thread
tens of microseconds late, which a GPU's driver, polling, does not, and steps of 10 ms are measured
in 1 ms, so that a busy machine leaves some windows undisturbed. Caches are warmer than after a real
wait. The clock stands still while the simulation keeps its books.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from remora.engine.graphs import device_sampler, step_sampling
from remora.engine.protocols import AttentionBackend
from remora.engine.runner.batch import ForwardBatch
from remora.kernels.lora import NO_GROUPS, RowGroups
from remora.kernels.sampling import NO_FAULT
from tests.engine.simulated.roofline import Roofline

T = TypeVar("T")
LOGIT_KERNELS = 2  # of those of a step: head, and copy in float32
VOCAB = 8  # of the logits in the host's memory; the roofline counts the model's


class HostClock:
    """The host's time: a real clock, plus waits, less the simulation's own work.

    waited_s:  seconds of all waits
    """

    def __init__(self, source: Callable[[], float] = time.perf_counter) -> None:
        self.source = source
        self.waited_s = 0.0
        self._ahead_s = 0.0

    def now(self) -> float:
        return self.source() + self._ahead_s

    def wait_until(self, moment: float) -> None:
        waiting_s = max(0.0, moment - self.now())
        self._ahead_s += waiting_s
        self.waited_s += waiting_s

    def pay(self, seconds: float) -> None:
        """Add the time of a call that this machine cannot make."""
        self._ahead_s += seconds

    def leave_out(self, started: float) -> None:
        """Take back the time since `source()` was `started`."""
        self._ahead_s -= self.source() - started


class SleepingClock(HostClock):
    """A clock that really waits, so that caches cool and other threads run meanwhile."""

    POLLING_S = 1e-4  # a sleeping thread wakes late

    def wait_until(self, moment: float) -> None:
        started = self.now()
        while (waiting_s := moment - self.now()) > 0:
            time.sleep(max(0.0, waiting_s - self.POLLING_S))
        self.waited_s += self.now() - started


@dataclass(frozen=True, slots=True)
class Mark:
    """The state when a graph starts to run.

    start_s:   by the clock
    idle_s:    seconds for which the device had nothing to do, so far
    host_s:    seconds that the host worked, so far
    num_uploads, num_waits:  as of SimulatedDevice, so far
    """

    start_s: float
    idle_s: float
    host_s: float
    num_uploads: int
    num_waits: int


class SimulatedDevice:
    """DeviceStream and GraphRunner of a device that runs its work in order.

    num_launches: graphs, copies and kernels that the host launched
    num_uploads:  copies from the host
    num_waits:    waits of the host for work that was not done yet
    """

    def __init__(self, roofline: Roofline, clock: HostClock | None = None) -> None:
        self.device = torch.device("cpu")
        self.roofline = roofline
        self.clock = clock or HostClock()
        self.marks: list[Mark] = []
        self.num_launches = 0
        self.num_uploads = 0
        self.num_waits = 0
        self._host = roofline.figures["host"]
        self._node_s = roofline.figures["device"]["node_s"]
        self._free_at = self.clock.now()
        self._idle_s = 0.0
        self._pinned: set[int] = set()
        self._recording: list[float] | None = None

    # -- work --------------------------------------------------------------------------------

    def work(self, seconds: float) -> None:
        """Let the device work after all that it was given before."""
        if self._recording is not None:
            self._recording.append(seconds)
            return
        start = max(self._free_at, self.clock.now())
        self._idle_s += start - self._free_at
        self._free_at = start + seconds

    def launch(self, num_kernels: int, seconds: float) -> None:
        """Launch kernels that take so long together; within a graph they cost the host nothing."""
        if self._recording is None:
            self.num_launches += num_kernels
            self.clock.pay(num_kernels * self._host["kernel_launch_s"])
        self.work(seconds)

    def synchronize(self) -> None:
        """Wait for all work."""
        self.wait_for(self._free_at)

    def wait_for(self, moment: float) -> None:
        started = self.clock.source()
        self.num_waits += moment > self.clock.now()
        self.clock.leave_out(started)
        self.clock.wait_until(moment)

    # -- DeviceStream ------------------------------------------------------------------------

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def pinned(self, num_bytes: int) -> Tensor:
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self._pinned.add(buffer.untyped_storage().data_ptr())
        return buffer

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        started = self.clock.source()
        self.num_uploads += source.untyped_storage().data_ptr() in self._pinned
        self.num_launches += 1
        self.clock.pay(self._host["copy_s"])
        self.work(self._node_s)
        self.clock.leave_out(started)

    @property
    def idle_s(self) -> float:
        """Seconds for which the device had nothing to do, so far."""
        return self._idle_s

    @property
    def free_at(self) -> float:
        """When the device has done all its work."""
        return self._free_at

    # -- GraphRunner -------------------------------------------------------------------------

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        self._recording = []
        made = run()
        seconds, self._recording = sum(self._recording), None

        def replay() -> T:
            started = self.clock.source()
            self.num_launches += 1
            self.clock.pay(self._host["graph_launch_s"])
            self.work(seconds)
            self._mark(self._free_at - seconds)
            self.clock.leave_out(started)
            return made

        return replay

    def close(self) -> None:
        pass

    def _mark(self, start_s: float) -> None:
        self.marks.append(
            Mark(
                start_s=start_s,
                idle_s=self._idle_s,
                host_s=self.clock.now() - self.clock.waited_s,
                num_uploads=self.num_uploads,
                num_waits=self.num_waits,
            )
        )

    # -- kernels -----------------------------------------------------------------------------

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Replace the kernels that choose tokens."""
        made = torch.tensor([[1], [NO_FAULT]]).expand(2, 4096).contiguous()
        num_launches = int(self.roofline.figures["nodes"]["sampling"])

        def choose(logits: Tensor, *_: Tensor, **__: Tensor) -> Tensor:
            started = self.clock.source()
            num_rows = len(logits)
            self.launch(num_launches, self.roofline.sampling_s(num_rows))
            self.clock.leave_out(started)
            return made[:, :num_rows]

        with (
            patch.object(device_sampler, "choose_on_device", choose),
            patch.object(step_sampling, "choose_on_device", choose),
        ):
            yield


class SimulatedEvent:
    """An event of a SimulatedDevice."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._moment = 0.0

    def record(self) -> None:
        self._moment = self._device.free_at

    def synchronize(self) -> None:
        self._device.wait_for(self._moment)


class SimulatedModel:
    """A Model whose passes take time and compute nothing."""

    vocab_size = VOCAB

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Launch all kernels of a step; the time of the logits is part of the step's."""
        num_tokens, num_rows = len(batch.token_ids), len(batch.lengths)
        roofline = self._device.roofline
        num_kernels = roofline.num_nodes - LOGIT_KERNELS
        self._device.launch(num_kernels, roofline.step_s(num_tokens, num_rows))
        return torch.zeros(num_tokens, 1)

    def logits(self, hidden: Tensor, adapters: RowGroups = NO_GROUPS) -> Tensor:
        self._device.launch(LOGIT_KERNELS, 0.0)
        return torch.zeros(len(hidden), VOCAB)
