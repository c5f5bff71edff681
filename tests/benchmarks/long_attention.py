"""Decode attention of one long sequence with one KV head: what a second thread gains.

    python tests/benchmarks/long_attention.py [--tokens 32768] [--layers 8] [--threads 2]
        [--kv-format PLAIN|INT8]

The KV cache of all layers is larger than the last cache. Prints, round by round, how many times as
fast more threads attend, and read the same memory plainly; at the end the medians and the share of
the second that attention reaches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from remora.configs.environment import cache_dir
from remora.deployments.bench.machine import describe_machine
from remora.kernels.cpu.buffers import Batch, PagedCache
from remora.kernels.cpu.build import load_library
from remora.kernels.cpu.library import Format, KvFormat, Library, Team
from remora.kernels.cpu.program import Program

HEADS, HEAD_DIM, PAGE_SIZE = 4, 128, 16


def make_program(
    team: Team, num_tokens: int, num_layers: int, kv_format: KvFormat
) -> tuple[Program, int]:
    """Return attention of one token after `num_tokens` others, and the bytes of the KV cache."""
    num_pages = -(-num_tokens // PAGE_SIZE)
    tables = torch.arange(1, num_pages + 1, dtype=torch.int32).view(1, -1)
    batch = Batch(max_tokens=1, max_rows=1, max_logits=1, tables=tables)
    batch.positions[0], batch.lengths[0], batch.starts[:2] = num_tokens - 1, num_tokens, (0, 1)
    cache = PagedCache.allocate(
        team,
        num_layers=num_layers,
        num_pages=num_pages + 1,
        page_size=PAGE_SIZE,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        format=Format.BF16,
        kv_format=kv_format,
    )
    if kv_format is KvFormat.PLAIN:
        cache.data.view(torch.bfloat16).normal_()
    else:
        cache.data.fill_(0x3C)  # codes of 60, and scales of 0.01
    qkv, out = torch.randn(1, (HEADS + 2) * HEAD_DIM), torch.empty(1, HEADS * HEAD_DIM)
    program = Program(team, batch)
    for layer in range(num_layers):
        program.attend(qkv, cache, layer, out, num_heads=HEADS, scale=HEAD_DIM**-0.5, window=None)
    return program, cache.data.nbytes


def seconds(work: Callable[[], object]) -> float:
    """Return the best of three runs."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kv-format", choices=["PLAIN", "INT8"], default="PLAIN")
    options = parser.parse_args()
    library = Library(load_library(cache_dir() / "kernels"))
    made = {
        threads: make_program(
            Team(library, threads), options.tokens, options.layers, KvFormat[options.kv_format]
        )
        for threads in (1, options.threads)
    }
    programs = {threads: program for threads, (program, _) in made.items()}
    memory = torch.zeros(made[1][1] // 8, dtype=torch.int64)
    print(f"{describe_machine()['processor']}; KV cache {memory.nbytes / 2**20:.0f} MiB")
    attention, reads = [], []
    for _ in range(options.rounds):
        took = {
            threads: seconds(lambda program=program: program.run(1, 1, 0))  # type: ignore[misc]
            for threads, program in programs.items()
        }
        read = {}
        for threads in programs:
            torch.set_num_threads(threads)
            read[threads] = seconds(memory.sum)
        attention.append(took[1] / took[options.threads])
        reads.append(read[1] / read[options.threads])
        rate = memory.nbytes / 1e9 / took[options.threads]
        print(
            f"attention x {attention[-1]:.2f} ({1e3 * took[1]:.2f} -> "
            f"{1e3 * took[options.threads]:.2f} ms, {rate:.1f} GB/s), reads x {reads[-1]:.2f} "
            f"({1e3 * read[1]:.2f} -> {1e3 * read[options.threads]:.2f} ms)"
        )
    gain, read_gain = statistics.median(attention), statistics.median(reads)
    print(f"medians: attention x {gain:.2f}, reads x {read_gain:.2f}: {gain / read_gain:.2f}")


if __name__ == "__main__":
    main()
