"""What a sum over ranks costs: two ways to make it, in turns, ranks being processes.

    python tests/benchmarks/ranks/sums.py

Prints the median microseconds of `Group.all_reduce`, by ranks and size.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))  # run as a script, not by pytest

from remora.deployments.free_ports import free_port
from remora.engine.parallel import connect as connecting
from remora.engine.parallel.layout import Layout

HOST, TIMEOUT_S = "127.0.0.1", 60.0
RANKS, ELEMENTS = (2, 3), (576, 16 * 576, 64 * 576, 512 * 576)
ROUNDS, SUMS = 6, 50
WAYS = {"exchange": 2**40, "ring": -1}


def main() -> None:
    """Measure and print a table."""
    sys.stdout.write("| ranks | floats | exchange, us | ring, us |\n|---|---|---|---|\n")
    for num_ranks in RANKS:
        for size, medians in measure(num_ranks).items():
            exchange, ring = (medians[way] for way in WAYS)
            sys.stdout.write(f"| {num_ranks} | {size} | {exchange:.0f} | {ring:.0f} |\n")


def measure(num_ranks: int) -> dict[int, dict[str, float]]:
    """Start the ranks; return medians by size and way."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    ranks = [
        context.Process(target=run_rank, args=(Layout(rank=rank, tp_size=num_ranks), port, theirs))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    found: dict[int, dict[str, float]] = mine.recv()
    for rank in ranks:
        rank.join()
    return found


def run_rank(layout: Layout, port: int, answer: Connection) -> None:
    """Make sums of every size in turns; rank 0 answers with the medians."""
    torch.set_num_threads(1)
    group = connecting.connect(
        layout,
        host=HOST,
        port=port,
        listener=connecting.listen(HOST, port) if layout.rank == 0 else None,
        device="cpu",
        timeout_s=TIMEOUT_S,
    )
    medians: dict[int, dict[str, float]] = {}
    for size in ELEMENTS:
        values = torch.zeros(size)
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way, limit in WAYS.items():
                connecting.EXCHANGE_BYTES = limit
                for _ in range(SUMS):
                    started = time.perf_counter()
                    group.all_reduce(values)
                    taken[way].append(time.perf_counter() - started)
        medians[size] = {way: 1e6 * statistics.median(times) for way, times in taken.items()}
    group.close()
    if layout.rank == 0:
        answer.send(medians)


if __name__ == "__main__":
    main()
