"""Rates of native products with packed weights, by format, shape and number of rows.

    python tests/benchmarks/native_products.py [--threads 1,2] [--rows 1,32,512] [--formats bf16,q8]
        [--shapes 576x3072,1536x576]

Prints billions of operations per second, the best of several runs over enough copies of the
weight that every run reads it from memory, as a step does; then the rate at which that reads the
weight as a share of a plain sum over the same bytes, the median of as many runs in turns.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from remora.configs.environment import cache_dir
from remora.deployments.bench.machine import describe_machine
from remora.kernels.cpu.buffers import Batch, Rows
from remora.kernels.cpu.build import load_library
from remora.kernels.cpu.library import Format, Library, Team
from remora.kernels.cpu.packing import PackedWeight, pack
from remora.kernels.cpu.program import Program
from remora.kernels.cpu.stored_layout import pack_stored
from remora.kernels.memory import Arena
from remora.kernels.quantised.block_weight import BLOCK_TYPES, BlockWeight
from remora.kernels.quantised.weight_kinds import IntWeight

SHAPES = "576x960,576x3072,1536x576,1024x6144,2048x2048,4096x4096"
FORMATS = {format.name.lower(): format for format in Format}
INTEGERS = re.compile(r"I([48])(Z?)_(\d+)")  # bits, whether there are zero points, a group's size
COPIES_BYTES = 96 << 20
REPEATS = 7


def packed(team: Team, format: Format, k: int, n: int, arena: Arena) -> PackedWeight:
    """Return a weight [n, k] in a format."""
    if format.name in BLOCK_TYPES:
        type = BLOCK_TYPES[format.name]
        blocks = torch.zeros(n, k // type.size * type.num_bytes, dtype=torch.uint8)
        weight = BlockWeight(blocks=blocks, type=format.name, size=(n, k))
        return pack_stored(team, weight, None, arena)
    if integers := INTEGERS.fullmatch(format.name):
        bits, zeros, size = int(integers[1]), bool(integers[2]), int(integers[3])
        return pack_stored(team, random_integers(n, k, bits, size, zeros), None, arena)
    return pack(team, torch.randn(n, k).bfloat16(), None, format, arena)


def random_integers(n: int, k: int, bits: int, size: int, zeros: bool) -> IntWeight:
    """Return random codes [n, k] with scales, and maybe zero points, of groups of `size`."""
    low = 0 if zeros else -(1 << bits - 1)
    dtype = torch.uint8 if zeros else torch.int8
    return IntWeight(
        codes=torch.randint(low, low + (1 << bits), (n, k), dtype=dtype),
        scales=torch.rand(n, k // size).half() * 0.01 + 0.001,
        zeros=torch.randint(0, 1 << bits, (n, k // size), dtype=torch.uint8) if zeros else None,
        groups=torch.arange(k) // size,
        bits=bits,
    )


def rate(team: Team, format: Format, k: int, n: int, rows: int) -> tuple[float, float]:
    """Return the GFLOP/s of products x [rows, k] W [n, k]^T, and their share of a plain read."""
    tables = torch.zeros(1, 1, dtype=torch.int32)
    program = Program(team, Batch(max_tokens=rows, max_rows=1, max_logits=1, tables=tables))
    x, arena = Rows.allocate(team, format, rows, k), Arena()
    floats, out = torch.randn(rows, k), torch.empty(rows, -(-n // 64) * 64)
    program.round(floats, k, x)
    weight = packed(team, format, k, n, arena)
    assert weight.format == format, f"packed as {weight.format.name}"
    copies = max(2, COPIES_BYTES // weight.num_bytes)
    datas = [arena.take(weight.num_bytes).copy_(weight.data) for _ in range(copies)]
    for data in datas:
        program.multiply(x, replace(weight, data=data), out)
    numbers = [data.view(torch.int64) for data in datas]
    program.run(rows, 0, 0)
    times, reads = [], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for each in numbers:
            each.sum()
        reads.append(time.perf_counter() - started)
        program.run(rows, 0, 0, first=1)  # until torch's threads sleep
        started = time.perf_counter()
        program.run(rows, 0, 0, first=1)
        times.append(time.perf_counter() - started)
    share = statistics.median(read / took for read, took in zip(reads, times, strict=True))
    return 2.0 * rows * k * n * copies / min(times) / 1e9, share


def main() -> None:
    """Print a table for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rows", default="1,8,32,64,512")
    parser.add_argument("--formats", default="bf16,q8,q8_0,q4")
    parser.add_argument("--shapes", default=SHAPES, help="k x n, separated by commas")
    args = parser.parse_args()
    console = Console()
    console.print(describe_machine())
    library = Library(load_library(cache_dir() / "kernels"))
    rows = [int(count) for count in args.rows.split(",")]
    for threads in map(int, args.threads.split(",")):
        team = Team(library, threads)
        torch.set_num_threads(threads)
        for format in args.formats.split(","):
            table = Table("k x n", *(f"{count} rows" for count in rows))
            table.title = f"{format}, threads: {threads}, GFLOP/s, share of a plain read"
            for shape in args.shapes.split(","):
                k, n = map(int, shape.split("x"))
                rates = (rate(team, FORMATS[format], k, n, count) for count in rows)
                table.add_row(shape, *(f"{speed:,.0f}  {share:.2f}" for speed, share in rates))
            console.print(table)
        team.close()


if __name__ == "__main__":
    main()
