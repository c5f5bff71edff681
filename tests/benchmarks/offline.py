"""Offline engine benchmark: decode alone, prefill alone, and a batch, in one run.

    python tests/benchmarks/offline.py [--model NAME_OR_PATH] [--dtype bfloat16] [--out FILE.json]

Greedy with ignore_eos on random token ids of a fixed seed, so that the work is the same each time.
Prints the median of several repetitions; absolute numbers move with the machine's load, so compare
only numbers of one run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from remora.engine.llm import LLM, SamplingParams

REPEATS = 3
SEED = 20_261_121


def make_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids, none of them shared as a prefix."""
    numbers = random.Random(seed)
    return [[numbers.randrange(1000, vocab_size) for _ in range(length)] for _ in range(count)]


def tokens_per_second(llm: LLM, count: int, prompt: int, output: int, seed: int) -> float:
    """Run `count` requests at once; returns output tokens/s (prompt tokens/s if output is 1)."""
    prompts = make_prompts(count, prompt, llm.tokenizer.vocab_size, seed)
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    return count * (prompt if output == 1 else output) / seconds


WORKLOADS = {
    "decode, batch 1, 128 in / 64 out": (1, 128, 64),
    "prefill, 1500 in / 1 out": (1, 1500, 1),
    "batch of 32, 128 in / 64 out": (32, 128, 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    started = time.perf_counter()
    llm = LLM(model=args.model, dtype=args.dtype, show_progress=False)
    load_s = time.perf_counter() - started
    results = {}
    for name, (count, prompt, output) in track(WORKLOADS.items(), "measuring"):
        tokens_per_second(llm, 1, 16, 4, SEED)
        runs = [tokens_per_second(llm, count, prompt, output, SEED + run) for run in range(REPEATS)]
        results[name] = {"median": statistics.median(runs), "min": min(runs), "max": max(runs)}

    table = Table("workload", "tokens/s (median)", "min", "max")
    for name, row in results.items():
        table.add_row(name, *(f"{row[key]:.1f}" for key in ("median", "min", "max")))
    Console().print(table)
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "machine": {"processor": platform.processor() or platform.machine()},
        "model": args.model,
        "dtype": llm.plan.dtype,
        "threads": llm.plan.num_threads,
        "load_s": round(load_s, 2),
        "tokens_per_s": results,
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
