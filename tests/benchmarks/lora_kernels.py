"""What low-rank updates cost on a GPU: each kernel checked against torch, then timed.

    python tests/benchmarks/lora_kernels.py [--interpret]

Weights of an 8B model's layers, 8 slots of rank 16. Prints, for decode steps and for chunks of
prompts, the relative error, and in bfloat16 the microseconds of shrink and expand, of both in
`LowRankSlots`, of its torch code, and of the product with the base's weight; then the bytes that
the update must move, and how fast it does. Inputs rotate among copies that no cache holds. Ends
with an error if a kernel is wrong. `--interpret` checks small sizes where there is no GPU, without
bfloat16, which triton's interpreter cannot multiply, and times nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUM_SLOTS, RANK = 8, 16
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
CACHE_BYTES = 256 * 2**20
MAX_COPIES, ROUNDS = 64, 50


@dataclass(frozen=True, slots=True)
class Layer:
    """A weight: inputs, and outputs of its parts."""

    name: str
    inputs: int
    parts: tuple[int, ...]


LAYERS = (
    Layer("qkv", 4096, (4096, 1024, 1024)),
    Layer("o", 4096, (4096,)),
    Layer("gate_up", 4096, (14336, 14336)),
    Layer("down", 14336, (4096,)),
)
SMALL = (Layer("qkv", 576, (90, 30, 30)), Layer("down", 1200, (70,)))
# Rows of the step, and to how many adapters they belong, turn by turn; 0 = the base model alone.
STEPS = ((1, 1), (16, 8), (64, 8), (256, 8), (2048, 1), (2048, 8))
SMALL_STEPS = ((1, 1), (9, 8), (70, 3), (260, 2))


def main() -> int:
    """Check and measure everything; return how many kernels were wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--interpret", action="store_true")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1" if options.interpret else "0"
    if not options.interpret and not torch.cuda.is_available():
        sys.stderr.write("There is no GPU; --interpret checks the kernels without one.\n")
        return 1
    device = "cpu" if options.interpret else "cuda"
    wrong = 0
    for layer, (rows, adapters), dtype in itertools.product(
        SMALL if options.interpret else LAYERS,
        SMALL_STEPS if options.interpret else STEPS,
        LIMITS,
    ):
        if options.interpret and dtype == torch.bfloat16:
            continue
        case = Case(layer, rows, adapters, dtype, device)
        error = case.error()
        wrong += not error < LIMITS[dtype]
        name = f"{layer.name:8} {rows:5} rows {adapters} adapters {str(dtype)[6:]:9}"
        sys.stdout.write(f"{name} error {error:.1e}{'' if error < LIMITS[dtype] else ' WRONG'}")
        if device == "cuda" and dtype == torch.bfloat16:
            sys.stdout.write(f"   {case.speeds()}")
        sys.stdout.write("\n")
    return wrong


class Case:
    """A step's rows and one layer's slots."""

    def __init__(
        self, layer: Layer, num_rows: int, adapters: int, dtype: torch.dtype, device: str
    ) -> None:
        from remora.kernels.lora import LowRankSlots, RowGroups
        from remora.kernels.row_tiles import RowTiles

        torch.manual_seed(0)
        self.layer, self.dtype, self.device = layer, dtype, device
        self.slots = LowRankSlots(
            NUM_SLOTS, layer.inputs, layer.parts, RANK, dtype=dtype, device=device
        )
        for slot, part in itertools.product(range(NUM_SLOTS), range(len(layer.parts))):
            a = self.random(RANK, layer.inputs) / layer.inputs**0.5
            self.slots.write(slot, part, a, self.random(layer.parts[part], RANK) / RANK**0.5)
        of_rows = (1 + np.arange(num_rows) % adapters).astype(np.int32)
        there = torch.device(device)
        self.tiles = RowTiles.of(of_rows, there)
        self.by_kernels = RowGroups(tiles=self.tiles)
        self.by_torch = RowGroups(
            tuple(
                (slot - 1, torch.from_numpy(np.flatnonzero(of_rows == slot)).to(there))
                for slot in np.unique(of_rows).tolist()
            )
        )
        self.num_rows, self.num_adapters = num_rows, len(self.by_torch.groups)

    def random(self, *shape: int) -> Tensor:
        """Return normal numbers in the number format, on the device."""
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def error(self) -> float:
        """Return the relative error of what the kernels add, against the torch code in float64."""
        from remora.kernels.lora import LowRankSlots

        slots, layer = self.slots, self.layer
        exact = LowRankSlots(
            NUM_SLOTS, layer.inputs, layer.parts, RANK, dtype=torch.float64, device=self.device
        )
        exact.a[:], exact.b[:], exact.ranks[:] = slots.a, slots.b, slots.ranks
        x = self.random(self.num_rows, layer.inputs)
        added = torch.zeros(self.num_rows, sum(layer.parts), dtype=self.dtype, device=self.device)
        expected = added.double()
        slots.add(x, added, self.by_kernels)
        exact.add(x.double(), expected, self.by_torch)
        return float((added.double() - expected).norm() / expected.norm())

    def speeds(self) -> str:
        """Return a line of medians, in microseconds."""
        from remora.kernels.gpu import lora as kernels

        slots, layer, tiles = self.slots, self.layer, self.tiles
        outputs = sum(layer.parts)
        num_bytes = self.num_rows * (layer.inputs + 2 * outputs) * slots.a.itemsize
        num_bytes += self.num_adapters * slots.num_bytes // NUM_SLOTS
        copies = min(MAX_COPIES, 1 + CACHE_BYTES // num_bytes)
        xs = [self.random(self.num_rows, layer.inputs) for _ in range(copies)]
        ys = [self.random(self.num_rows, outputs) for _ in range(copies)]
        weight = self.random(outputs, layer.inputs)
        splits = kernels.splits_of(layer.inputs, tiles)
        width = slots.a.shape[1]
        shrunk = torch.empty((self.num_rows, splits, width), device=self.device)
        ranks = torch.from_numpy(slots.ranks).to(self.device)
        bounds = torch.tensor(slots.bounds, dtype=torch.int32, device=self.device)

        def shrink(x: Tensor, y: Tensor) -> None:
            kernels.shrink(x, slots.a, ranks, tiles, shrunk, max_rank=RANK)

        def expand(x: Tensor, y: Tensor) -> None:
            kernels.expand(shrunk, slots.b, ranks, bounds, tiles, y)

        def both(x: Tensor, y: Tensor) -> None:
            slots.add(x, y, self.by_kernels)

        def reference(x: Tensor, y: Tensor) -> None:
            slots.add(x, y, self.by_torch)

        def base(x: Tensor, y: Tensor) -> None:
            torch.mm(x, weight.T, out=y)

        taken = {
            run.__name__: replayed_us(run, xs, ys)
            for run in (shrink, expand, both, reference, base)
        }
        times = "  ".join(f"{name} {us:.1f}" for name, us in taken.items())
        speed = num_bytes / taken["both"] / 1e6
        return f"us: {times}   {num_bytes / 2**20:.1f} MiB, {speed:.2f} TB/s"


def replayed_us(run: Callable[[Tensor, Tensor], None], xs: list[Tensor], ys: list[Tensor]) -> float:
    """Return the median microseconds of one call, out of captured graphs of one call for each x."""
    for x, y in zip(xs, ys, strict=True):
        run(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, y in zip(xs, ys, strict=True):
            run(x, y)
    new_event: Callable[..., Any] = torch.cuda.Event
    taken: list[float] = []
    for _ in range(ROUNDS):
        start, end = (new_event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1e3 / len(xs))
    return statistics.median(taken)


if __name__ == "__main__":
    sys.exit(main())
