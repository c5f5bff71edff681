"""A device's two streams, whose work runs later, in any order that events allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from remora.engine.offload.streams import HostCopies

CPU = torch.device("cpu")
Work = Callable[[], bool]  # returns whether it could run


@dataclass
class Moment:
    """One recording of an event."""

    is_reached: bool = False

    def reach(self) -> bool:
        self.is_reached = True
        return True


@dataclass
class SimulatedEvent:
    """An event, of which a wait means the latest recording, as in CUDA."""

    latest: Moment = field(default_factory=lambda: Moment(is_reached=True))


class SimulatedCopies(HostCopies):
    """CopyStreams whose work waits for `run`; copies and uses take place in two halves.

    eagerness:  how likely the stream of copies is served first
    """

    def __init__(self, seed: int, eagerness: float) -> None:
        super().__init__(CPU)
        self._random, self._eagerness = random.Random(seed), eagerness
        self._steps: deque[Work] = deque()
        self._copies: deque[Work] = deque()

    def event(self) -> SimulatedEvent:
        return SimulatedEvent()

    def record(self, event: SimulatedEvent) -> None:
        event.latest = Moment()
        self._steps.append(event.latest.reach)

    def wait(self, event: SimulatedEvent) -> None:
        moment = event.latest
        self._steps.append(lambda: moment.is_reached)

    def copy(
        self,
        target: Tensor,
        sources: Sequence[Tensor],
        *,
        after: SimulatedEvent,
        done: SimulatedEvent,
    ) -> None:
        source, began = torch.cat(list(sources)), after.latest
        half = len(source) // 2
        self._copies.append(lambda: began.is_reached)
        for part in (slice(0, half), slice(half, None)):
            self._copies.append(partial(_copied, target[part], source[part]))
        done.latest = Moment()
        self._copies.append(done.latest.reach)

    def use(self, buffer: Tensor, expected: Tensor) -> None:
        """Let the steps read a buffer twice, which must hold what is expected both times."""

        def read() -> bool:
            assert torch.equal(buffer[: len(expected)], expected)
            return True

        self._steps += [read, read]

    def run(self) -> None:
        """Run all work."""
        while self._steps or self._copies:
            order = [self._steps, self._copies]
            if self._random.random() < self._eagerness:
                order.reverse()
            assert any(_ran(stream) for stream in order), "both streams wait for ever"


def _ran(stream: deque[Work]) -> bool:
    """Run the first work of a stream, if it can run."""
    if not stream or not stream[0]():
        return False
    stream.popleft()
    return True


def _copied(target: Tensor, source: Tensor) -> bool:
    target.copy_(source)
    return True


class LateCopies(HostCopies):
    """CopyStreams of a CPU that copies when a layer waits, the latest moment at which it may."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.num_copies = 0

    def event(self) -> list[tuple[Tensor, Sequence[Tensor]]]:
        return []

    def copy(
        self,
        target: Tensor,
        sources: Sequence[Tensor],
        *,
        after: list[tuple[Tensor, Sequence[Tensor]]],
        done: list[tuple[Tensor, Sequence[Tensor]]],
    ) -> None:
        done.append((target, sources))
        self.num_copies += 1

    def wait(self, event: list[tuple[Tensor, Sequence[Tensor]]]) -> None:
        assert len(event) == 1, "a copy that no layer has waited for"
        target, sources = event.pop()
        super().copy(target, sources, after=None, done=None)
