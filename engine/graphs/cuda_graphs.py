"""Captures device work once and replays it without launches by the host: CUDA graphs on a GPU.

Captured work reads and writes memory at fixed addresses: the caller writes new values there before
a replay. Knows nothing of models.
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
    """Disable garbage collection within the block: each run walks every object."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphRunner(Protocol):
    """Captures work whose results stay in the same memory."""

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        """Call `run` at least twice and capture it; returns the replay.

        Each replay returns the same memory, which the next replay of any graph of this runner
        overwrites.
        """

    def close(self) -> None:
        """Free all graphs; their replays must not be called again."""


class CudaGraphRunner:
    """GraphRunner of CUDA graphs, which share one memory pool: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all graphs: torch caches memory per stream.
        self._side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        """Capture a graph. Capture larger graphs first: smaller ones reuse their memory."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            run()  # compiles kernels and lets libraries allocate, which a capture must not do
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # Driver calls of other threads do not disturb the capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
        ):
            made = run()
        self._graphs.append(graph)
        graph.replay()  # the first launch uploads it: no request waits, and its memory is taken

        def replay() -> T:
            graph.replay()
            return made

        return replay

    def close(self) -> None:
        """Free the graphs."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
