"""Quantised checkpoints as step programs: beside torch's with their dequantised copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from remora.engine.graphs.step_builder import StepProgramBuilder
from remora.engine.graphs.step_program import StepProgram
from remora.engine.graphs.step_weights import WeightFormats
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.load import open_model
from remora.engine.runner.device import make_attention
from remora.engine.runner.eager import EagerForward
from remora.engine.runner.inputs import InputBatch
from remora.kernels.cpu.library import Format, Library, Team
from tests.conftest import TinyCheckpoints
from tests.engine.fakes import make_plan
from tests.engine.graphs.stepping import (
    NO_ADAPTERS,
    NUM_PAGES,
    PAGE_SIZE,
    SHAPE,
    Stepper,
    as_it_is,
    check_same_bits,
    make_table,
)
from tests.engine.graphs.test_adapters import ADAPTERS, add_adapters
from tests.engine.loaded import load
from tests.engine.models.families import make_family
from tests.engine.weights.formats.checkpoints import quantise
from tests.engine.weights.formats.writers import Sample, Written, bnb_nf4, numbers, streams

QKV = ("q_proj", "k_proj", "v_proj")
LINEARS = (*QKV, "o_proj", "gate_proj", "up_proj", "down_proj")
STEPS = ({0: 30, 1: 70}, {0: 1, 1: 1, 2: 20})
MOST_DIFFERENCE = 0.2  # as a share of the norm: what rounding activations costs these small models


def int8(outputs: int, inputs: int) -> Written:
    """Write what `Format.Q8` holds, in GPTQ's words, of the size of usual weights."""
    made = numbers(outputs, inputs, 64, 8, zero=128, dtype=torch.bfloat16)
    made.scales.copy_(torch.rand_like(made.scales) * 4e-4)
    plain = (made.codes - 128) * made.scales.float()[:, made.groups]
    tensors = {
        "qweight": streams(made.codes, 8).T.contiguous(),
        "qzeros": streams(made.zeros.T, 8),
        "scales": made.scales.T.contiguous(),
    }
    return tensors, plain


SETTINGS = {"quant_method": "gptq", "bits": 8, "group_size": 64, "checkpoint_format": "gptq_v2"}
INT8 = Sample(SETTINGS, int8)


def nf4(outputs: int, inputs: int) -> Written:
    """Write indices into a table, of the size of usual weights."""
    tensors, plain = bnb_nf4(outputs, inputs, is_nested=False)
    return tensors | {"weight.absmax": tensors["weight.absmax"] * 0.05}, plain * 0.05


NF4 = Sample({"quant_method": "bitsandbytes"}, nf4)


@contextmanager
def built(
    path: Path,
    library: Library,
    format: Format = Format.BF16,
    prepare: Callable[[DecoderModel], None] = as_it_is,
    table: InputBatch | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Iterator[StepProgram]:
    """Build a checkpoint's step program as the engine does.

    format:   of layers that are not multiplied as they are stored
    prepare:  what is done with the model before its weights are read
    table:    of the rows' pages
    kv_dtype: of quantised K and V; None = they are not
    """
    opened = open_model(
        path, dtype=torch.bfloat16, load_format="auto", device="cpu", show_progress=False
    )
    with opened as (model, fill):
        prepare(model)
        program = StepProgramBuilder(
            model,
            Team(library, 2),
            replace(SHAPE, kv_dtype=kv_dtype),
            make_table() if table is None else table,
            WeightFormats(layers=format, head=Format.BF16),
        ).build(fill)
    try:
        yield program
    finally:
        program.close()


def check_close(
    quantised: Path,
    plain: Path,
    library: Library,
    prepare: Callable[[DecoderModel], None] = as_it_is,
    adapters: Mapping[int, int] = NO_ADAPTERS,
) -> None:
    model = load(plain)
    prepare(model)
    attention = make_attention(model, make_plan(page_size=PAGE_SIZE), NUM_PAGES)
    exact = Stepper(EagerForward(model, attention, page_size=PAGE_SIZE), make_table(), adapters)
    table = make_table()
    with built(quantised, library, prepare=prepare, table=table) as program:
        native = Stepper(program, table, adapters)
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
    with built(quantised, library) as held, built(plain, library, Format.Q8) as rounded:
        assert held.weight_bytes == rounded.weight_bytes


def test_runs_within_rows_are_multiplied_as_they_are_stored(
    library: Library, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    quantised, plain = quantise(tiny_checkpoints("llama"), tmp_path, NF4, LINEARS)

    check_close(quantised, plain, library)
    with built(quantised, library) as held, built(plain, library) as whole:
        assert held.weight_bytes < whole.weight_bytes


@pytest.mark.parametrize("endings", [("q_proj", "gate_proj"), ("k_proj", "up_proj", "down_proj")])
def test_parts_in_several_formats_are_several_products(
    endings: tuple[str, ...], library: Library, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    quantised, plain = quantise(tiny_checkpoints("llama-bias"), tmp_path, INT8, endings)

    check_close(quantised, plain, library)


@pytest.mark.parametrize("endings", [LINEARS, ("v_proj", "down_proj", "lm_head")])
def test_adapters_are_added_to_weights_as_they_are_stored(
    endings: tuple[str, ...], library: Library, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    quantised, plain = quantise(tiny_checkpoints("llama"), tmp_path, INT8, endings)

    check_close(quantised, plain, library, add_adapters, ADAPTERS)


@pytest.mark.parametrize(
    ("family", "endings"),
    [
        ("phi3", ("qkv_proj", "gate_up_proj")),
        ("internlm2", ("wqkv", "w1", "w3")),
        ("deepseek-v3", ("q_a_proj", "q_b_proj", "o_proj", *LINEARS)),
    ],
)
def test_weights_that_are_split_and_joined_differently(
    family: str,
    endings: tuple[str, ...],
    library: Library,
    tiny_checkpoints: TinyCheckpoints,
    tmp_path: Path,
) -> None:
    is_common = family == "deepseek-v3"
    path = tiny_checkpoints(family) if is_common else make_family(tmp_path / family, family)[0]
    quantised, plain = quantise(path, tmp_path, INT8, endings)

    check_close(quantised, plain, library)


@pytest.mark.parametrize("endings", [("w1", "w2", "w3"), ("w1", "w2"), ("0.w1", "0.w3", "w2")])
def test_experts_are_multiplied_as_they_are_stored(
    endings: tuple[str, ...], library: Library, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    quantised, plain = quantise(tiny_checkpoints("mixtral"), tmp_path, INT8, endings)

    check_close(quantised, plain, library)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_multiplied_as_it_is_stored(
    tied: bool, library: Library, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("llama", tie_word_embeddings=tied)
    quantised, plain = quantise(path, tmp_path, INT8, ("embed_tokens", "lm_head"))

    check_close(quantised, plain, library)
    with built(quantised, library) as held, built(plain, library) as whole:
        assert held.weight_bytes < whole.weight_bytes


@pytest.mark.parametrize("endings", [LINEARS, ("q_proj", "down_proj")])
def test_logits_are_the_same_bits_in_chunks_and_company(
    endings: tuple[str, ...], library: Library, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    quantised, _ = quantise(tiny_checkpoints("llama"), tmp_path, INT8, endings)
    tables = make_table(), make_table()
    with (
        built(quantised, library, table=tables[0]) as first,
        built(quantised, library, table=tables[1]) as second,
    ):
        steppers = iter([Stepper(first, tables[0]), Stepper(second, tables[1])])
        check_same_bits(lambda: next(steppers))
