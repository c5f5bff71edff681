"""Recording device work once, and running it again without a host that launches it.

A seam: CUDA graphs on a GPU. What is recorded reads and writes memory that stays where it is, so
whoever replays it has put new values there. Knows nothing of models.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect none amid the block: each time it looks at every object there is."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphRunner(Protocol):
    """Records work whose results stay in the same memory."""

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Run something twice or more and record it; returns what runs it again.

        What it returns is the same each time: memory that the next replay of any recording of this
        recorder overwrites.
        """
        ...

    def close(self) -> None:
        """Forget all recordings; what they run must not be called any more."""
        ...


class CudaGraphRunner:
    """Recorder of CUDA graphs, which share one pool of memory: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: memory that torch keeps for a stream serves no other.
        self._side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Record a graph; the larger ones first, for the smaller find their memory in the pool."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            run()  # compiles kernels and lets libraries allocate, which no graph may hold
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # What other threads of the process ask of the driver meanwhile does no harm.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
        ):
            made = run()
        self._graphs.append(graph)

        def replay() -> T:
            graph.replay()
            return made

        return replay

    def close(self) -> None:
        """Free the graphs."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
