"""What it costs to take another rank along: two ranks in two processes, no model.

    python tests/benchmarks/ranks/step_channel.py [--steps 2000]

Prints milliseconds, p50 and p99: `send`, what rank 0's thread spends on telling; `there`, until
the follower has read the step, brought its rows up to date and laid the inputs out, answer to us
included; `all-reduce`, the same with one gloo sum of [rows, 576] float32 instead of the answer,
beside `sum alone`, that sum without a step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3]))  # run as a script, not by pytest

from remora.engine.parallel.follower import Follower
from remora.engine.parallel.group import Group
from remora.engine.parallel.layout import Layout
from remora.engine.parallel.rendezvous import Host, Meeting, join
from remora.engine.runner.inputs import InputBatch, StepInputs
from remora.engine.types import RowInit, SamplingParams, StepPlan

MAX_ROWS, MAX_TOKENS, PAGE_SIZE, WIDTH = 256, 8192, 16, 576
NOTHING = np.empty(0, np.int32)
WARM_UP = 100


class Answer:
    """Forward pass that says when it is called."""

    def __init__(self, reply: Connection) -> None:
        self._reply = reply

    def forward(self, inputs: StepInputs) -> Tensor:
        self._reply.send_bytes(b"1")
        return torch.empty(0)

    def logits(self, first: int, last: int) -> Tensor:
        return torch.empty(0)

    def hidden(self, first: int, last: int) -> Tensor:
        return torch.empty(0)

    def close(self) -> None:
        pass


class Sum(Answer):
    """Forward pass that is one sum over the ranks."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def forward(self, inputs: StepInputs) -> Tensor:
        return self._group.all_reduce(torch.ones((len(inputs.rows), WIDTH)))


def make_table() -> InputBatch:
    return InputBatch(max_rows=MAX_ROWS, max_tokens=MAX_TOKENS, page_size=PAGE_SIZE)


def follow(meeting: Meeting, reply: Connection, sums: bool) -> None:
    torch.set_num_threads(1)
    channel, group = join(meeting, Layout(rank=1, tp_size=2), "cpu")
    Follower(Sum(group) if sums else Answer(reply), make_table(), channel, group).run()


def start(row: int, count: int) -> RowInit:
    return RowInit(
        row=row,
        token_ids=np.arange(count, dtype=np.int64),
        num_prompt_tokens=count,
        seed=0,
        sampling=SamplingParams(),
    )


def make_plan(rows: list[int], position: int, counts: int, added: tuple[RowInit, ...]) -> StepPlan:
    first, last = position // PAGE_SIZE, (position + counts - 1) // PAGE_SIZE
    new = [page for page in range(first, last + 1) if page * PAGE_SIZE >= position or added]
    return StepPlan(
        step_id=position,
        added=added,
        dropped=NOTHING,
        page_rows=np.repeat(np.array(rows, np.int32), len(new)),
        page_ids=np.array(new * len(rows), np.int32),
        rows=np.array(rows, np.int32),
        starts=np.full(len(rows), position, np.int32),
        num_tokens=np.full(len(rows), counts, np.int32),
        samples=np.ones(len(rows), np.bool_),
    )


def decodes(num_rows: int, steps: int) -> Iterator[StepPlan]:
    rows = list(range(num_rows))
    yield make_plan(rows, 0, 1, tuple(start(row, 1) for row in rows))
    for position in range(1, steps):
        yield make_plan(rows, position, 1, ())


def prefills(steps: int) -> Iterator[StepPlan]:
    for _ in range(steps):
        yield make_plan([0], 0, 512, (start(0, 512),))


class Pair:
    """This process as rank 0, and another as rank 1."""

    def __init__(self, address: str | None, target: Callable[..., None], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        host = Host(address, come_s=60, exchange_s=60)
        self.process = context.Process(target=target, args=(host.meeting, *args))
        self.process.start()
        with closing(host):
            self.followers, self.group = host.gather(Layout(tp_size=2), "cpu")

    def close(self) -> None:
        self.followers.close()
        self.process.join()
        self.group.close()


def measure(
    address: str | None, plans: list[StepPlan], sums: bool
) -> tuple[list[float], list[float]]:
    """Return the seconds of sending each step, and those until it is done."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    rows, token_ids = NOTHING, np.zeros(MAX_ROWS, np.int64)
    sent, done = [], []
    with closing(Pair(address, follow, theirs, sums)) as pair:
        for plan in plans:
            started = time.perf_counter()
            pair.followers.step(plan, rows, token_ids[: len(rows)])
            sent.append(time.perf_counter() - started)
            if sums:
                pair.group.all_reduce(torch.ones((len(plan.rows), WIDTH)))
            else:
                ours.recv_bytes()
            done.append(time.perf_counter() - started)
            rows = plan.rows
    return sent, done


def sum_only(meeting: Meeting, rows: int, steps: int) -> None:
    torch.set_num_threads(1)
    _, group = join(meeting, Layout(rank=1, tp_size=2), "cpu")
    for _ in range(steps):
        group.all_reduce(torch.ones((rows, WIDTH)))


def measure_sum(rows: int, steps: int) -> list[float]:
    """Return the seconds of each sum over two ranks that do nothing else."""
    taken = []
    with closing(Pair(None, sum_only, rows, steps)) as pair:
        for _ in range(steps):
            started = time.perf_counter()
            pair.group.all_reduce(torch.ones((rows, WIDTH)))
            taken.append(time.perf_counter() - started)
    return taken


def percentiles(seconds: list[float]) -> str:
    cut = statistics.quantiles(seconds[WARM_UP:], n=100)
    return f"{cut[49] * 1e3:7.3f} {cut[98] * 1e3:7.3f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    cases = {f"{rows} decodes": list(decodes(rows, steps)) for rows in (1, 32, 256)}
    cases["prefill of 512"] = list(prefills(steps))
    print("p50 and p99 in ms      send             there            all-reduce       sum alone")
    for name, plans in cases.items():
        alone = percentiles(measure_sum(len(plans[0].rows), steps))
        for kind, address in (("Unix", None), ("TCP", "127.0.0.1")):
            sent, done = measure(address, plans, sums=False)
            _, summed = measure(address, plans, sums=True)
            columns = [percentiles(seconds) for seconds in (sent, done, summed)]
            print(f"{name:15} {kind:5}", *columns, alone, sep="  ")


if __name__ == "__main__":
    main()
