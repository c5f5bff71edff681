"""Ranks as threads of this process: each loads its share, and all make the same calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from remora.configs.planning.plan import EnginePlan
from remora.deployments.free_ports import free_port
from remora.engine.models.load import load_model
from remora.engine.parallel.connect import connect, listen
from remora.engine.parallel.group import Group
from remora.engine.parallel.layout import Layout
from remora.engine.protocols import ForwardPass
from remora.engine.runner.forward import DTYPES, build_forward
from remora.engine.runner.inputs import InputBatch, StepInputs

HOST = "127.0.0.1"
TIMEOUT_S = 60.0

T = TypeVar("T")


class Threads:
    """One thread a rank."""

    def __init__(self, num_ranks: int) -> None:
        self._threads = [ThreadPoolExecutor(1, f"rank{rank}") for rank in range(num_ranks)]
        self.on_all(lambda rank: torch.set_num_threads(1))

    def on_all(self, call: Callable[[int], T]) -> list[T]:
        """Make the call on every rank at once; return what each returns."""
        futures = [thread.submit(call, rank) for rank, thread in enumerate(self._threads)]
        return [future.result() for future in futures]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


@contextmanager
def connected(
    tp_size: int, pp_size: int = 1, *, timeout_s: float = TIMEOUT_S
) -> Iterator[tuple[Threads, list[Group]]]:
    """Join ranks; they leave at the end."""
    threads, port = Threads(tp_size * pp_size), free_port()
    listener = listen(HOST, port) if tp_size * pp_size > 1 else None

    def join(rank: int) -> Group:
        layout = Layout(rank=rank, tp_size=tp_size, pp_size=pp_size)
        return connect(
            layout,
            host=HOST,
            port=port,
            listener=listener if rank == 0 else None,
            device="cpu",
            timeout_s=timeout_s,
        )

    groups = threads.on_all(join)
    try:
        yield threads, groups
    finally:
        for group in groups:
            group.close()
        threads.close()


class RanksForward:
    """ForwardPass that asks every rank, each in its thread, and returns what rank 0 returns."""

    def __init__(self, threads: Threads, forwards: list[ForwardPass]) -> None:
        self._threads = threads
        self._forwards = forwards

    def forward(self, inputs: StepInputs) -> Tensor:
        return self._first(lambda rank: self._forwards[rank].forward(inputs))

    def logits(self, first: int, last: int) -> Tensor:
        return self._first(lambda rank: self._forwards[rank].logits(first, last))

    def hidden(self, first: int, last: int) -> Tensor:
        return self._forwards[0].hidden(first, last)

    def close(self) -> None:
        for forward in self._forwards:
            forward.close()

    def _first(self, call: Callable[[int], Tensor]) -> Tensor:
        first, *others = self._threads.on_all(call)
        assert all(len(logits) == 0 for logits in others)
        return first


@contextmanager
def ranks_forward(path: Path, plan: EnginePlan, table: InputBatch) -> Iterator[RanksForward]:
    """Load a model in shares, as the plan divides it; the plan may also be of one rank."""
    plan = replace(plan, cpu_kernels="torch")
    with connected(plan.tp_size, plan.pp_size) as (threads, groups):

        def build(rank: int) -> ForwardPass:
            model = load_model(
                path,
                dtype=DTYPES[plan.dtype],
                load_format="auto",
                device="cpu",
                show_progress=False,
                layout=groups[rank].layout,
            )
            return build_forward(model, plan, table, path, groups[rank]).forward

        yield RanksForward(threads, threads.on_all(build))
