"""Measure the cost of adapters in a step program, alternating between programs.

    python tests/benchmarks/adapters.py [MODEL] [--quantization int8] [--threads 2] [--rank 16]

Two programs of one model, one without room for adapters and one whose layers all have slots filled
with random adapters. Prints the median milliseconds of each kind of step, its speed relative to the
program without adapters (the median over the turns; 1.00 = as fast, below that slower), with the
quartiles, and how much memory a slot takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch

from remora.configs.environment import cache_dir
from remora.engine.graphs.step_builder import StepProgramBuilder, StepShape
from remora.engine.graphs.step_program import StepProgram
from remora.engine.graphs.step_weights import WeightFormats
from remora.engine.layers.linear import Linear
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.load import load_model
from remora.engine.runner.inputs import InputBatch, StepInputs
from remora.engine.weights.resolve_model import resolve_model
from remora.kernels.cpu.build import load_library
from remora.kernels.cpu.library import Format, Library, Team
from remora.kernels.lora import LowRankSlots
from tests.engine.graphs.stepping import QUANTIZED_FORMATS

BATCH, CONTEXT, CHUNK, PAGE_SIZE = 16, 256, 512, 16
PAGES = -(-(max(CONTEXT, CHUNK) + 1) // PAGE_SIZE)  # of a row
NUM_SLOTS = 8


def linears(model: DecoderModel) -> Iterator[Linear]:
    """Yield what PEFT calls all-linear."""
    for block in model.blocks:
        yield from (linear for _, linear in block.linears(""))


def add_adapters(model: DecoderModel, rank: int, max_rank: int) -> list[LowRankSlots]:
    """Fill all slots of every layer with small random updates."""
    made = [linear.allocate_slots(NUM_SLOTS, max_rank) for linear in linears(model)]
    for slots in made:
        for slot in range(NUM_SLOTS):
            for part in range(len(slots.bounds) - 1):
                size = slots.bounds[part + 1] - slots.bounds[part]
                a = torch.randn(rank, slots.a.shape[2]) * 0.01
                slots.write(slot, part, a, torch.randn(size, rank) * 0.01)
    return made


def build(model: DecoderModel, quantization: str, num_threads: int) -> StepProgram:
    """Build a program for whole batches, with a team of its own."""
    plain = Format.of(model.dtype)
    formats = QUANTIZED_FORMATS.get(quantization, WeightFormats(layers=plain, head=plain))
    table = InputBatch(max_rows=BATCH, max_tokens=PAGES * PAGE_SIZE, page_size=PAGE_SIZE)
    table.tables[:, :PAGES] = 1 + np.arange(BATCH * PAGES).reshape(BATCH, PAGES)
    shape = StepShape(
        max_tokens=CHUNK,
        max_rows=BATCH,
        num_pages=BATCH * PAGES,
        page_size=PAGE_SIZE,
        max_positions=PAGES * PAGE_SIZE,
    )
    team = Team(Library(load_library(cache_dir() / "kernels")), num_threads)
    return StepProgramBuilder(model, team, shape, table, formats).build()


def make_inputs(num_rows: int, first: int, count: int, adapters: list[int]) -> StepInputs:
    """Lay out `count` tokens of each row from position `first` on."""
    positions = np.tile(np.arange(first, first + count), num_rows)
    rows = np.arange(num_rows)
    pages = 1 + np.repeat(rows, count) * PAGES + positions // PAGE_SIZE
    starts = np.arange(num_rows + 1) * count
    return StepInputs(
        token_ids=np.random.default_rng(0).integers(10, 10_000, num_rows * count),
        positions=positions,
        slots=pages * PAGE_SIZE + positions % PAGE_SIZE,
        starts=starts,
        lengths=np.full(num_rows, first + count),
        rows=rows,
        tables=np.empty((0, 0), np.int32),
        num_decodes=num_rows if count == 1 else 0,
        logit_index=starts[1:] - 1,
        adapters=np.repeat(adapters, count).astype(np.int32),
        grown=np.empty((4, 0), np.int32),
    )


def measure(arms: dict[str, tuple[StepProgram, StepInputs]], turns: int) -> dict[str, list[float]]:
    """Return the seconds of each arm's steps; a turn has one of each, and begins with another."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(turns + 3):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            program, inputs = arms[name]
            started = time.perf_counter()
            program.forward(inputs)
            if turn >= 3:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def report(seconds: dict[str, list[float]]) -> None:
    """Print a line for each arm; the first is what the others are compared with."""
    base = next(iter(seconds.values()))
    for name, taken in seconds.items():
        speeds = [ours / theirs for ours, theirs in zip(base, taken, strict=True)]
        low, middle, high = statistics.quantiles(speeds, n=4)
        sys.stdout.write(
            f"{name:34} {statistics.median(taken) * 1e3:8.2f} ms   "
            f"{middle:.3f} of base ({low:.3f} to {high:.3f})\n"
        )


def main() -> None:
    """Measure decode steps of 16 rows and a chunk of one prompt."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", default="none", choices=("none", *QUANTIZED_FORMATS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = resolve_model(options.model, cache_dir())
    plain, adapted = (
        load_model(
            path, dtype=torch.bfloat16, load_format="auto", device="cpu", show_progress=False
        )
        for _ in range(2)
    )
    slots = add_adapters(adapted, options.rank, options.max_rank)
    base = build(plain, options.quantization, options.threads)
    lora = build(adapted, options.quantization, options.threads)
    mib = sum(layer.num_bytes for layer in slots) / NUM_SLOTS / 2**20
    sys.stdout.write(f"{mib:.1f} MiB a slot of rank {options.max_rank}\n")

    def decode(adapters: list[int]) -> StepInputs:
        return make_inputs(BATCH, CONTEXT, 1, adapters)

    def chunk(adapter: int) -> StepInputs:
        return make_inputs(1, 0, CHUNK, [adapter])

    eight = [1 + row % NUM_SLOTS for row in range(BATCH)]
    decodes = {
        f"decode {BATCH} rows": (base, decode([0] * BATCH)),
        "  none of them uses its adapter": (lora, decode([0] * BATCH)),
        f"  {NUM_SLOTS} adapters mixed": (lora, decode(eight)),
        f"  4 adapters, {BATCH // 2} rows of none": (
            lora,
            decode([slot if slot <= 4 else 0 for slot in eight]),
        ),
        "  one adapter": (lora, decode([1] * BATCH)),
    }
    report(measure(decodes, options.turns))
    chunks = {
        f"prompt of {CHUNK} tokens": (base, chunk(0)),
        "  without its adapter": (lora, chunk(0)),
        "  of one adapter": (lora, chunk(1)),
    }
    report(measure(chunks, max(options.turns // 10, 5)))
    for program in (base, lora):
        program.close()


if __name__ == "__main__":
    main()
