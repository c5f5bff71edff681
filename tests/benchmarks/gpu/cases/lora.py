"""Low-rank updates of an 8B model's layers, in slots of rank 16: each kernel, and both together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from remora.kernels.gpu import lora as kernels
from remora.kernels.lora import LowRankSlots, RowGroups
from remora.kernels.row_tiles import RowTiles
from tests.benchmarks.gpu.timing import Call, KernelCase, Pairs

NUM_SLOTS, RANK = 8, 16


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
SMALL = (Layer("qkv", 576, (90, 30, 30)),)
# Rows of the step, and to how many adapters they belong, turn by turn.
STEPS = ((1, 1), (64, 8), (256, 8), (2048, 8))
SMALL_STEPS = ((3, 2),)


def cases(*, tiny: bool) -> Iterator[KernelCase]:
    """Yield the update of each layer in each step, as a whole, and its two kernels of one layer."""
    layers, steps = (SMALL, SMALL_STEPS) if tiny else (LAYERS, STEPS)
    for layer, (rows, adapters) in itertools.product(layers, steps):
        for part in ("lora", "lora shrink", "lora expand"):
            if part == "lora" or layer is layers[0]:
                yield case(part, layer, rows, adapters)


def case(part: str, layer: Layer, rows: int, adapters: int) -> KernelCase:
    outputs, width = sum(layer.parts), RANK * len(layer.parts)
    used = min(rows, adapters)
    shrink = rows * layer.inputs + used * layer.inputs * width
    expand = 2 * rows * outputs + used * RANK * outputs
    needed = {"lora": shrink + expand, "lora shrink": shrink, "lora expand": expand}
    return KernelCase(
        model="llama-3.1-8b",
        kernel=part,
        shape=f"{layer.name} {rows} rows {adapters} adapters",
        num_bytes=2.0 * needed[part],
        make=lambda device, dtype: make(part, layer, rows, adapters, device, dtype),
    )


def make(
    part: str,
    layer: Layer,
    num_rows: int,
    adapters: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Call:
    slots = LowRankSlots(
        NUM_SLOTS, layer.inputs, layer.parts, RANK, dtype=dtype, device=device.type
    )
    written: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for slot, (number, outputs) in itertools.product(range(NUM_SLOTS), enumerate(layer.parts)):
        a = torch.randn(RANK, layer.inputs, device=device) / layer.inputs**0.5
        b = torch.randn(outputs, RANK, device=device)
        written[slot, number] = a.to(dtype), b.to(dtype)
        slots.write(slot, number, *written[slot, number])
    tiles = RowTiles.of((1 + np.arange(num_rows) % adapters).astype(np.int32), device)
    x = torch.randn(num_rows, layer.inputs, device=device).to(dtype)
    y = torch.zeros(num_rows, sum(layer.parts), dtype=dtype, device=device)
    if part == "lora":
        groups = RowGroups(tiles=tiles)

        def result() -> Tensor:
            updated = torch.zeros_like(y)
            slots.add(x, updated, groups)
            return updated

        def expected(result: Tensor) -> Pairs:
            for slot in range(adapters):
                own = x[slot::adapters].float()
                parts = [
                    own @ written[slot, part][0].float().T @ written[slot, part][1].float().T
                    for part in range(len(layer.parts))
                ]
                yield result[slot::adapters], torch.cat(parts, dim=1)

        return Call(lambda: slots.add(x, y, groups), result=result, expected=expected)
    splits = kernels.splits_of(layer.inputs, tiles)
    shrunk = torch.zeros((num_rows, splits, slots.a.shape[1]), device=device)
    ranks = torch.from_numpy(slots.ranks).to(device)
    bounds = torch.tensor(slots.bounds, dtype=torch.int32, device=device)
    if part == "lora shrink":
        return Call(lambda: kernels.shrink(x, slots.a, ranks, tiles, shrunk, max_rank=RANK))
    return Call(lambda: kernels.expand(shrunk, slots.b, ranks, bounds, tiles, y))
