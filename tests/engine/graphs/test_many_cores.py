"""Steps of published models have enough chunks for many threads, by a model of their times.

Programs are built over memory that is never touched: only numbers of chunks are asked for. Times
follow from bytes and operations; `-s` prints those of steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remora.configs.environment import cache_dir
from remora.engine.graphs import step_experts, step_latents, step_weights
from remora.engine.graphs.step_builder import StepProgramBuilder, StepShape
from remora.engine.graphs.step_weights import WeightFormats
from remora.engine.models.architectures import parse_config
from remora.engine.models.decoder import DecoderBlock, DecoderModel
from remora.engine.runner.inputs import InputBatch
from remora.kernels.cpu.build import InstructionSet, NativeUnavailable, load_library
from remora.kernels.cpu.library import PANEL, Format, Library, Team
from remora.kernels.cpu.packing import PackedWeight
from remora.kernels.cpu.program import Program
from remora.kernels.memory import buffer

PUBLISHED = Path(__file__).parents[1] / "models" / "published.jsonl"
# Layers that are built, and how often each occurs in the model.
MODELS = {
    "Llama-3.1-8B-Instruct": (32,),
    "Qwen3-30B-A3B": (48,),
    "DeepSeek-V2-Lite": (1, 26),
}
THREADS = (16, 64, 128)
# Operations with fewer chunks although they are divided as finely as they can be: into products of
# one cache line of columns, and into partitions of attention.
LIMITED = {
    ("Llama-3.1-8B-Instruct", 64): {"attend"},
    ("Llama-3.1-8B-Instruct", 128): {"multiply"},
    ("Qwen3-30B-A3B", 64): {"multiply"},
    ("Qwen3-30B-A3B", 128): {"multiply"},
    ("DeepSeek-V2-Lite", 16): {"attend"},
    ("DeepSeek-V2-Lite", 64): {"attend", "multiply"},
    ("DeepSeek-V2-Lite", 128): {"attend", "multiply"},
}

# What one of many threads does in a second: its share of 12 channels of DDR5-6400 for 64 cores,
# multiplications and additions in bfloat16 with AVX-512, elements of operations on rows.
BYTES, FLOPS, ELEMENTS = 9.6e9, 100e9, 4e9
STAGE_END_S = 1e-6
SHORT_S = 20e-6
ENOUGH = 3
CONTEXT = 4096  # positions that a row of a decode step sees
PARTITION = 256  # positions that attention computes together
VECTOR, TILE_ROWS = 16, 6  # columns and rows of products that are computed together
QUERY_ROWS = 48  # tokens times heads that attention computes together
PARTITION_SUMS = 4 << 20  # floats of memory for sums of partitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`num_rows` sequences with `num_tokens` new tokens in all, which see `context` positions."""

    num_rows: int
    num_tokens: int
    context: int


DECODES = [Step(num_rows=rows, num_tokens=rows, context=CONTEXT) for rows in (1, 8, 32)]
STEPS = [*DECODES, Step(num_rows=1, num_tokens=512, context=512)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an operation does in a step.

    time_s:  of one thread alone
    share:   of its chunks that have work
    finest:  largest number of chunks that is possible without dividing sums or cache lines
    """

    time_s: float
    share: float = 1.0
    finest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation as it was added to a program.

    layer:  number of the layer; None = before or after layers
    """

    name: str
    arguments: tuple[Any, ...]
    keeps: tuple[Any, ...]
    layer: int | None

    def work(self, step: Step) -> Work:
        """Return what it does in a step."""
        if self.name == "multiply":
            on_logits, weight = self.arguments[:2]
            return product([weight], step.num_rows if on_logits else step.num_tokens)
        if self.name == "multiply_heads":
            return product(self.keeps[0], step.num_tokens)
        if self.name == "multiply_experts":
            return experts(self.keeps[0], step.num_tokens, self.arguments[3].top_k)
        if self.name == "attend":
            return attention(self.arguments[0], step)
        return on_rows(self.name, self.arguments, step)


def product(weights: list[PackedWeight], num_rows: int) -> Work:
    """Weights are read from memory once, and every row is multiplied with each."""
    weight, number = weights[0], len(weights)
    flops = 2 * weight.n * weight.k * num_rows * number
    return Work(
        time_s=max(number * weight.num_bytes / BYTES, flops / FLOPS),
        finest=number * parts_of(weight) * math.ceil(num_rows / TILE_ROWS),
    )


def experts(weights: list[PackedWeight], num_tokens: int, top_k: int) -> Work:
    """Tokens choose experts evenly; an expert that no token chooses is not read."""
    weight, number, pairs = weights[0], len(weights), num_tokens * top_k
    used = number * (1 - (1 - top_k / number) ** num_tokens)
    flops = 2 * weight.n * weight.k * pairs
    return Work(
        time_s=max(used * weight.num_bytes / BYTES, flops / FLOPS),
        share=used / min(pairs, number),
        finest=int(used) * parts_of(weight),
    )


def parts_of(weight: PackedWeight) -> int:
    """Return the number of parts of columns that can be computed apart: gates need both halves."""
    return weight.num_panels * PANEL // (2 * VECTOR if weight.is_gated else VECTOR)


def attention(settings: Any, step: Step) -> Work:
    cache, new = settings.cache, step.num_tokens // step.num_rows
    num_bytes = step.num_rows * step.context * cache.num_kv_heads * cache.head_dim * 2 * 2
    seen = new * (step.context - (new - 1) / 2)
    flops = 4 * settings.num_heads * cache.head_dim * step.num_rows * seen
    heads = settings.num_heads // cache.num_kv_heads
    block = max(1, QUERY_ROWS // heads)
    room, finest = PARTITION_SUMS, 0
    for first in range(0, new, block):
        num_tokens = min(block, new - first)
        end = step.context - new + first + num_tokens
        for _ in range(step.num_rows * cache.num_kv_heads):
            parts = math.ceil(end / PARTITION)
            size = parts * num_tokens * heads * (cache.head_dim + VECTOR + 1)
            divides = parts > 1 and size <= room
            room -= size if divides else 0
            finest += parts if divides else 1
    return Work(time_s=max(num_bytes / BYTES, flops / FLOPS), finest=finest)


def on_rows(name: str, arguments: tuple[Any, ...], step: Step) -> Work:
    """Return what an operation does that computes each row whole."""
    elements: dict[str, Callable[[], int]] = {
        "embed": lambda: arguments[2],
        "norm": lambda: arguments[2],
        "round": lambda: arguments[1] * arguments[4],
        "rotate_and_store": lambda: arguments[0].stride,
        "route": lambda: arguments[3].num_experts * (arguments[3].top_k + 40),  # not in vectors
        "sort_pairs": lambda: 16 * arguments[0].top_k,  # not in vectors
        "gather": lambda: arguments[3].top_k * arguments[1].values.shape[1],
        "weighted": lambda: arguments[0].top_k * arguments[0].size,
        "join_latents": lambda: arguments[0].heads_stride,
        "join_heads": lambda: arguments[0].num_heads * arguments[0].size,
    }
    num_rows = step.num_rows if name == "norm" and arguments[0] else step.num_tokens
    is_whole = name == "sort_pairs"
    return Work(time_s=num_rows * elements[name]() / ELEMENTS, finest=1 if is_whole else num_rows)


class Recorder:
    """What is added to the program that is built."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.layer: int | None = None
        self.program: Program | None = None


@pytest.fixture(scope="module")
def library() -> Library:
    """A library that multiplies by vectors; products by tiles are not cut within a panel."""
    folder = cache_dir() / "kernels"
    try:
        return Library(load_library(folder, instruction_set=InstructionSet.AVX512))
    except NativeUnavailable:
        return Library(load_library(folder))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Records what is added to programs; weights are not read when they are packed."""
    recorder = Recorder()
    add, add_layer = Program.add, StepProgramBuilder._layer

    def record(program: Program, name: str, *arguments: object, keeps: Any = ()) -> None:
        recorder.program = program
        operation = Operation(
            name=name, arguments=arguments, keeps=tuple(keeps), layer=recorder.layer
        )
        recorder.operations.append(operation)
        add(program, name, *arguments, keeps=keeps)

    def record_layer(builder: StepProgramBuilder, layer: int, block: DecoderBlock) -> None:
        recorder.layer = layer
        add_layer(builder, layer, block)
        recorder.layer = None

    monkeypatch.setattr(Program, "add", record)
    monkeypatch.setattr(StepProgramBuilder, "_layer", record_layer)
    for module in (step_experts, step_latents):
        monkeypatch.setattr(module, "pack", pack_nothing)
    monkeypatch.setattr(step_weights, "pack_into", lambda *arguments, **options: None)
    return recorder


def pack_nothing(
    team: Team,
    weight: Tensor,
    bias: Tensor | None,
    format: Format,
    arena: object,
    *,
    gated: bool = False,
    spent: bool = False,
) -> PackedWeight:
    """Return a weight of the right size."""
    n, k = weight.shape
    data = buffer((-(-n // PANEL) * team.library.panel_bytes(format, k),), torch.uint8)
    return PackedWeight(format=format, n=n, k=k, is_gated=gated, data=data, bias=bias)


def make_model(name: str) -> DecoderModel:
    """Return a model without weights that has one layer of each kind."""
    lines = map(json.loads, PUBLISHED.read_text().splitlines())
    raw = next(line["config"] for line in lines if line["name"] == name)
    assert raw["num_hidden_layers"] == sum(MODELS[name])
    config = parse_config({**raw, "num_hidden_layers": len(MODELS[name])})
    return DecoderModel(config, dtype=torch.bfloat16, device="cpu")


def build(model: DecoderModel, team: Team) -> None:
    num_rows = max(step.num_rows for step in STEPS)
    shape = StepShape(
        max_tokens=max(step.num_tokens for step in STEPS),
        max_rows=num_rows,
        num_pages=num_rows * CONTEXT // 16,
        page_size=16,
        max_positions=CONTEXT,
    )
    table = InputBatch(max_rows=num_rows, max_tokens=CONTEXT, page_size=16)
    formats = WeightFormats(layers=Format.BF16, head=Format.BF16)
    StepProgramBuilder(model, team, shape, table, formats).build()


def chunks_of(program: Program, step: Step) -> list[int]:
    batch, new = program.batch, step.num_tokens // step.num_rows
    batch.starts[: step.num_rows + 1] = range(0, step.num_tokens + 1, new)
    batch.lengths[: step.num_rows] = step.context
    batch.positions[: step.num_tokens] = [
        step.context - new + token % new for token in range(step.num_tokens)
    ]
    return program.num_chunks(step.num_tokens, step.num_rows, step.num_rows)


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("name", MODELS)
def test_stages_of_more_than_20_us_have_three_chunks_for_each_thread(
    library: Library, recorder: Recorder, name: str, num_threads: int
) -> None:
    team = Team(library, num_threads)
    build(make_model(name), team)
    program, operations = recorder.program, recorder.operations
    assert program is not None
    limited = set()
    for step in STEPS:
        total_s = even_s = 0.0
        for operation, chunks in zip(operations, chunks_of(program, step), strict=True):
            work = operation.work(step)
            busy = chunks * work.share
            time_s = math.ceil(busy / num_threads) * work.time_s / busy
            repeats = 1 if operation.layer is None else MODELS[name][operation.layer]
            total_s += repeats * (time_s + STAGE_END_S)
            even_s += repeats * work.time_s / num_threads
            if time_s <= SHORT_S:
                continue
            assert busy >= min(ENOUGH * num_threads, work.finest), (step, operation)
            if busy < ENOUGH * num_threads:
                limited.add(operation.name)
        print(
            f"{name}, {num_threads} threads, {step.num_rows} rows, {step.num_tokens} tokens: "
            f"{total_s * 1e3:.1f} ms modelled, {even_s * 1e3:.1f} ms if divided evenly"
        )

    assert limited == LIMITED.get((name, num_threads), set())
    team.close()
