"""Rates of native products with packed weights, by format, shape and number of rows.

    python tests/benchmarks/native_products.py [--threads 1,2] [--rows 1,32,512] [--formats bf16,q8]
        [--shapes 576x3072,1536x576]

Prints billions of operations per second: the best of several runs over enough copies of the weight
that every run reads it from memory, as a step does.
"""

from __future__ import annotations

import argparse
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

SHAPES = "576x960,576x3072,1536x576,1024x6144,2048x2048,4096x4096"
FORMATS = {format.name.lower(): format for format in Format}
COPIES_BYTES = 96 << 20
REPEATS = 7


def packed(team: Team, format: Format, k: int, n: int, arena: Arena) -> PackedWeight:
    """Return a weight [n, k] in a format."""
    if format.name not in BLOCK_TYPES:
        return pack(team, torch.randn(n, k).bfloat16(), None, format, arena)
    type = BLOCK_TYPES[format.name]
    blocks = torch.zeros(n, k // type.size * type.num_bytes, dtype=torch.uint8)
    return pack_stored(team, BlockWeight(blocks=blocks, type=format.name, size=(n, k)), None, arena)


def rate(team: Team, format: Format, k: int, n: int, rows: int) -> float:
    """Return the rate in GFLOP/s of products x [rows, k] W [n, k]^T."""
    copies = max(2, COPIES_BYTES // (n * k * 2))
    tables = torch.zeros(1, 1, dtype=torch.int32)
    program = Program(team, Batch(max_tokens=rows, max_rows=1, max_logits=1, tables=tables))
    x, arena = Rows.allocate(team, format, rows, k), Arena()
    floats, out = torch.randn(rows, k), torch.empty(rows, -(-n // 64) * 64)
    program.round(floats, k, x)
    weight = packed(team, format, k, n, arena)
    for _ in range(copies):
        data = arena.take(weight.num_bytes).copy_(weight.data)
        program.multiply(x, replace(weight, data=data), out)
    best = float("inf")
    program.run(rows, 0, 0)
    for _ in range(REPEATS):
        started = time.perf_counter()
        program.run(rows, 0, 0, first=1)
        best = min(best, time.perf_counter() - started)
    return 2.0 * rows * k * n * copies / best / 1e9


def main() -> None:
    """Print a table for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rows", default="1,8,32,64,512")
    parser.add_argument("--formats", default="bf16,q8,q4")
    parser.add_argument("--shapes", default=SHAPES, help="k x n, separated by commas")
    args = parser.parse_args()
    console = Console()
    console.print(describe_machine())
    library = Library(load_library(cache_dir() / "kernels"))
    rows = [int(count) for count in args.rows.split(",")]
    for threads in map(int, args.threads.split(",")):
        team = Team(library, threads)
        for format in args.formats.split(","):
            table = Table("k x n", *(f"{count} rows" for count in rows))
            table.title = f"{format}, threads: {threads}, GFLOP/s"
            for shape in args.shapes.split(","):
                k, n = map(int, shape.split("x"))
                rates = (rate(team, FORMATS[format], k, n, count) for count in rows)
                table.add_row(shape, *(f"{value:,.0f}" for value in rates))
            console.print(table)
        team.close()


if __name__ == "__main__":
    main()
