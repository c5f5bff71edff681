"""What a kernel is measured with: a call on inputs of its own, what it must move and multiply.

Inputs rotate among copies that no cache holds together, and all calls are one recorded graph, so
that what is timed is the device and not the launching.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CACHE_BYTES = 256 * 2**20  # five times the second-level cache of an H200
MAX_COPIES = 64
ROUNDS, MIN_ROUNDS, ROUNDS_S = 50, 5, 0.1
GRAPH_S, MAX_TIMES = 2e-3, 20  # of a replay


Pairs = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel with its inputs.

    run:       calls it
    result:    calls it on the original inputs and returns what it computes; None = `run` does both
    expected:  yields parts of a result with what they should be, from torch in float32, a part at a
               time; None = not compared
    peers:     others that compute the same, by name
    """

    run: Callable[[], object]
    result: Callable[[], Tensor] | None = None
    expected: Callable[[Tensor], Pairs] | None = None
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)

    def computed(self) -> Tensor:
        """Return what the kernel computes."""
        made = self.run() if self.result is None else self.result()
        assert isinstance(made, Tensor)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """A kernel on inputs of one shape.

    num_bytes:  that must be read and written at least
    flops:      that must be computed; 0 = next to none
    make:       makes inputs on a device, floats in a format, and returns a call with them
    peers:      names of others that `make` returns
    """

    model: str
    kernel: str
    shape: str
    num_bytes: float
    flops: float = 0.0
    make: Callable[[torch.device, torch.dtype], Call]
    peers: tuple[str, ...] = ()

    def calls(self, device: torch.device, dtype: torch.dtype) -> list[Call]:
        """Make the call on as many copies of its inputs as no cache holds together."""
        copies = min(MAX_COPIES, 1 + int(CACHE_BYTES // max(1.0, self.num_bytes)))
        return [self.make(device, dtype) for _ in range(copies)]


def replayed_s(calls: list[Callable[[], object]]) -> float:
    """Return the median seconds of one of the calls, which are recorded together.

    They are recorded so often that to begin a graph, some microseconds, is next to nothing.
    """

    def run() -> None:
        for call in calls:
            call()

    run()
    times = max(1, min(MAX_TIMES, int(GRAPH_S / max(1e-6, seconds_of(run)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    rounds = max(MIN_ROUNDS, min(ROUNDS, int(ROUNDS_S / max(1e-6, seconds_of(graph.replay)))))
    measured = statistics.median(seconds_of(graph.replay) for _ in range(rounds))
    return measured / (times * len(calls))


def seconds_of(run: Callable[[], object]) -> float:
    """Return the seconds that the device takes."""
    new_event: Any = torch.cuda.Event
    start, end = (new_event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
