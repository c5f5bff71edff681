"""Quantised checkpoints as step programs: beside torch's with their dequantised copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from remora.engine.graphs.step_builder import StepProgramBuilder, StepShape
from remora.engine.models.load import open_model
from remora.engine.runner.device import make_attention
from remora.engine.runner.eager import EagerForward
from remora.kernels.cpu.library import Format, Library, Team
from remora.kernels.quantised.weight_kinds import WeightKind
from tests.conftest import TinyCheckpoints
from tests.engine.fakes import make_plan
from tests.engine.graphs.stepping import (
    MAX_ROWS,
    MAX_TOKENS,
    NUM_PAGES,
    PAGE_SIZE,
    Stepper,
    check_same_bits,
    make_table,
)
from tests.engine.loaded import load
from tests.engine.weights.formats.checkpoints import quantise
from tests.engine.weights.formats.writers import Sample, Written, _ct, numbers, streams

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STEPS = ({0: 30, 1: 70}, {0: 1, 1: 1, 2: 20})
MOST_DIFFERENCE = 0.2  # as a share of the norm: what rounding activations costs these small models


def int8(outputs: int, inputs: int) -> Written:
    """Write what `Format.Q8` holds, of the size of usual weights."""
    made = numbers(outputs, inputs, 64, 8, zero=128, dtype=torch.bfloat16)
    made.scales.copy_(torch.rand_like(made.scales) * 4e-4)
    plain = (made.codes - 128) * made.scales.float()[:, made.groups]
    shape = torch.tensor([outputs, inputs])
    codes = streams(made.codes, 8)
    return {"weight_packed": codes, "weight_scale": made.scales, "weight_shape": shape}, plain


INT8 = Sample(_ct(8, 64), int8)


@contextmanager
def stepping(path: Path, library: Library) -> Iterator[tuple[Stepper, dict[str, int]]]:
    """Yield a step program of a checkpoint, and the number of bytes of its packed weights."""
    shape = StepShape(
        max_tokens=MAX_TOKENS,
        max_rows=MAX_ROWS,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_positions=MAX_TOKENS,
    )
    table = make_table()
    options = {"dtype": torch.bfloat16, "load_format": "auto", "device": "cpu"}
    with open_model(path, show_progress=False, **options) as (model, fill):
        program = StepProgramBuilder(
            model,
            Team(library, 2),
            shape,
            table,
            layer_format=Format.BF16,
            head_format=Format.BF16,
        ).build(fill)
    yield Stepper(program, table), {"weights": program.weight_bytes}
    program.close()


def in_torch(path: Path) -> Stepper:
    """Return the model in float32."""
    model = load(path)
    attention = make_attention(model, make_plan(page_size=PAGE_SIZE), NUM_PAGES)
    return Stepper(EagerForward(model, attention, page_size=PAGE_SIZE), make_table())


def check_close(quantised: Path, plain: Path, library: Library) -> None:
    exact = in_torch(plain)
    with stepping(quantised, library) as (native, _):
        for counts in STEPS:
            expected = exact.step(counts)
            difference = (native.step(counts) - expected).norm() / expected.norm()
            assert difference < MOST_DIFFERENCE


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen3"])
def test_weights_are_multiplied_as_they_are_stored(
    family: str, library: Library, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    quantised, plain = quantise(tiny_checkpoints(family), tmp_path, INT8, LINEARS)

    check_close(quantised, plain, library)
