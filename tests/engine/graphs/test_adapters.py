"""Adapters in step programs: beside torch's, and rows of none as if there were none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remora.engine.layers.embedding import Embedding
from remora.engine.layers.linear import Linear
from remora.engine.models.decoder import DecoderModel
from remora.kernels.cpu.library import Library
from remora.kernels.lora import LowRankSlots
from tests.conftest import TinyCheckpoints
from tests.engine.graphs.stepping import (
    MODES,
    check_close,
    check_same_bits,
    make_eager,
    make_native,
)
from tests.engine.models.families import make_family

MAX_RANK = 12
RANKS = (12, 0, 5)  # of each slot
ADAPTERS = {0: 1, 2: 3, 3: 2}  # of the rows; row 1 has none, and row 3 an empty slot
STEPS = ({0: 30, 1: 70}, {0: 1, 1: 1, 2: 20}, {0: 1, 1: 1, 2: 1, 3: 9})
# Norm of what the logits differ by, as a share of their own; see test_step_program.py. Where
# rounding seems to choose another expert, the error of float16 is ten times that of other rows.
ERRORS = {
    "none": 0.08,
    "int8": 0.3,
    "int8 in groups of 64": 0.3,
    "int4": 0.3,
    "int4_pure": 0.3,
    "float32": 1e-4,
    "float16": 0.04,
    "float16 in int8": 0.3,
}


def layers(model: DecoderModel) -> Iterator[Linear | Embedding]:
    yield model.embedding
    for block in model.blocks:
        yield from (linear for _, linear in block.linears(""))
    yield model.head.linear


def fill(slots: LowRankSlots, generator: torch.Generator) -> None:
    """Write updates of about half the size of these models' weights, rounded to bfloat16."""

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.2).bfloat16()

    for slot, rank in enumerate(RANKS):
        for part in range(len(slots.bounds) - 1):
            size = slots.bounds[part + 1] - slots.bounds[part]
            if rank > 0:
                slots.write(slot, part, draw(rank, slots.a.shape[2]), draw(size, rank))


def add_adapters(model: DecoderModel, chosen: slice = slice(None)) -> None:
    generator = torch.Generator().manual_seed(0)
    for layer in list(layers(model))[chosen]:
        fill(layer.allocate_slots(len(RANKS), MAX_RANK), generator)


def add_adapters_of_some(model: DecoderModel) -> None:
    add_adapters(model, slice(1, None, 3))


@pytest.mark.parametrize("prepare", [add_adapters, add_adapters_of_some])
@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen3"])
@pytest.mark.parametrize("mode", MODES)
def test_logits_are_close_to_those_of_torch_with_the_same_adapters(
    mode: str,
    family: str,
    prepare: Callable[[DecoderModel], None],
    library: Library,
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    path = tiny_checkpoints(family)
    native = make_native(path, library, mode, prepare=prepare, adapters=ADAPTERS)
    exact = make_eager(path, library, mode, prepare=prepare, adapters=ADAPTERS)
    base = make_eager(path, library, mode)

    for counts in STEPS:
        expected, unchanged = exact.step(counts), base.step(counts)
        # A step's rows come in the order of decodes, then chunks.
        rows = sorted(counts, key=lambda row: counts[row] > 1)
        changed = [place for place, row in enumerate(rows) if row in (0, 2)]
        error = (native.step(counts) - expected).norm() / expected.norm()
        assert error < ERRORS[mode]
        change = (expected - unchanged).norm(dim=1) / expected.norm(dim=1)
        assert (change[changed] > 2 * ERRORS[mode]).all()
    native.forward.close()


@pytest.mark.parametrize("family", ["olmo2", "stablelm-parallel", "starcoder2"])
def test_adapters_of_other_blocks_are_those_of_torch(
    family: str, library: Library, tmp_path: Path
) -> None:
    path, _ = make_family(tmp_path, family)
    options: dict[str, Any] = {"prepare": add_adapters_of_some, "adapters": ADAPTERS}
    check_close(path, library, "float32", STEPS, ERRORS["float32"], **options)


@pytest.mark.parametrize("prepare", [add_adapters, add_adapters_of_some])
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("granite-moe-shared", "float32"),
        ("granite-moe-shared", "int8"),
        ("glm4-moe", "float32"),
        ("deepseek-v3", "float32"),
        # With int4, parts of other formats are one product with adapters of these sizes.
        *(("deepseek-v2-lite", mode) for mode in MODES if mode != "int4"),
    ],
)
def test_adapters_beside_experts_and_of_latents_are_those_of_torch(
    family: str,
    mode: str,
    prepare: Callable[[DecoderModel], None],
    library: Library,
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    def prepared(model: DecoderModel) -> None:
        prepare(model)
        model.embedding.adapters = None  # a scaled embedding has no place for them

    options: dict[str, Any] = {"prepare": prepared, "adapters": ADAPTERS}
    # One token's best experts are so close that rounding to bfloat16 may route it to others.
    limit = max(ERRORS[mode], 0.2) if mode == "none" else ERRORS[mode]
    check_close(tiny_checkpoints(family), library, mode, STEPS, limit, **options)


@pytest.mark.parametrize("mode", MODES)
def test_rows_without_an_adapter_are_the_bits_of_a_program_without_adapters(
    mode: str, library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama")
    mixed = make_native(path, library, mode, prepare=add_adapters, adapters=ADAPTERS)
    unused = make_native(path, library, mode, prepare=add_adapters)
    plain = make_native(path, library, mode)

    for counts in STEPS:
        expected = plain.step(counts)
        rows = sorted(counts, key=lambda row: counts[row] > 1)
        logits = mixed.step(counts)
        for place, row in enumerate(rows):
            assert torch.equal(logits[place], expected[place]) == (row in (1, 3))
        assert torch.equal(unused.step(counts), expected)
    for stepper in (mixed, unused, plain):
        stepper.forward.close()


@pytest.mark.parametrize("mode", MODES)
def test_rows_with_adapters_are_the_same_bits_in_chunks_and_company(
    mode: str, library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama")
    check_same_bits(
        partial(make_native, path, library, mode, prepare=add_adapters, adapters=ADAPTERS)
    )


@pytest.mark.parametrize("mode", MODES)
def test_logits_asked_for_afterwards_have_their_tokens_adapters(
    mode: str, library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    native = make_native(
        tiny_checkpoints("llama"), library, mode, prepare=add_adapters, adapters=ADAPTERS
    )

    last = native.step({0: 40, 1: 30})

    assert torch.equal(native.forward.logits(39, 40), last[:1])
    assert torch.equal(native.forward.logits(69, 70), last[1:])
    native.forward.close()
