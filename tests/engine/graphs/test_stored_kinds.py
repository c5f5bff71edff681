"""Whole models in every kind of weights that is multiplied as stored, on every instruction set.

Logits are compared with those of torch in float32 with dequantised weights. Products read rows
that are rounded to 8 bits or to bfloat16: how much that changes the logits, in torch too, is the
measure of how far the native ones may be off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from remora.engine.models.decoder import DecoderModel
from remora.engine.models.load import open_weights
from remora.engine.protocols import QuantisedSource
from remora.engine.runner.device import make_attention
from remora.engine.runner.eager import EagerForward
from remora.kernels.cpu.library import Format, Library, Team
from remora.kernels.cpu.stored_layout import native_format
from remora.kernels.kv_store import KV_DTYPES
from tests.conftest import TinyCheckpoints
from tests.engine.fakes import make_plan
from tests.engine.graphs.stepping import (
    NUM_PAGES,
    PAGE_SIZE,
    Stepper,
    as_it_is,
    check_same_bits,
    make_table,
)
from tests.engine.graphs.stored_checkpoints import CASES, SIZES
from tests.engine.graphs.test_stored_weights import STEPS, built
from tests.engine.loaded import load
from tests.engine.models.oracle import Oracle
from tests.engine.models.test_parity import ids, make_llm, make_prompts
from tests.kernels.cpu.products import make_rows, read_rows
from tests.thinned import thinned

Pair = Callable[[str], tuple[Path, Path]]
USUAL = ("int4 of 128 with zeros", "float8 in blocks", "Q4_K")  # one of each way to multiply
EVERY = [
    pytest.param(name, marks=[] if name in USUAL else [pytest.mark.slow], id=name) for name in CASES
]
# As much as the rows' rounding costs in torch, the difference between two ways to round included.
MOST_ERROR = 2.0


@pytest.fixture(scope="module")
def pair(tiny_checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """`pair(name)` returns a case's quantised checkpoint and its twin, made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            torch.manual_seed(0)
            path = tiny_checkpoints("llama", **SIZES)
            made[name] = CASES[name].make(path, tmp_path_factory.mktemp("pair"))
        return made[name]

    return make


def formats_of(path: Path) -> dict[str, Format]:
    """Return the native format of each weight; those that are not quantised are bfloat16."""
    source = open_weights(path, "auto")
    assert isinstance(source, QuantisedSource)
    found = {name: native_format(kind) for name, kind in source.kinds(source.quantised())}
    return {name: format for name, format in found.items() if format is not None}


def read_by(team: Team, formats: Mapping[str, Format], model: DecoderModel) -> None:
    """Let a model's products read rows as the native products of these formats do."""
    for prefix, linear in model.linears():
        (format,) = {formats.get(name, Format.BF16) for name in linear.weights(prefix)}
        linear.product = partial(multiply_rounded, team, format)


def multiply_rounded(
    team: Team, format: Format, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    rows = read_rows(make_rows(team, format.of_rows, x.float()), x.shape[1])
    return F.linear(rows.float(), weight, bias)


def torch_stepper(path: Path, prepare: Callable[[DecoderModel], None] = as_it_is) -> Stepper:
    model = load(path)
    model.embedding.weight.copy_(model.embedding.weight.bfloat16())
    prepare(model)
    attention = make_attention(model, make_plan(page_size=PAGE_SIZE), NUM_PAGES)
    return Stepper(EagerForward(model, attention, page_size=PAGE_SIZE), make_table())


@pytest.mark.parametrize("name", EVERY)
def test_logits_are_those_of_the_dequantised_weights(
    name: str, library: Library, pair: Pair
) -> None:
    quantised, plain = pair(name)
    formats, team, table = formats_of(quantised), Team(library, 1), make_table()
    assert {*formats.values()} == {CASES[name].format}
    exact = torch_stepper(plain)
    rounded = torch_stepper(plain, partial(read_by, team, formats))

    with built(quantised, library, table=table) as program:
        native = Stepper(program, table)
        for counts in STEPS:
            expected = exact.step(counts)
            rounding = (rounded.step(counts) - expected).norm()
            error = (native.step(counts) - expected).norm()
            assert error < MOST_ERROR * rounding
    team.close()


@pytest.mark.parametrize("name", EVERY)
def test_logits_are_the_same_bits_in_chunks_and_company(
    name: str, library: Library, pair: Pair
) -> None:
    check_bits(pair(name)[0], library, None)


@pytest.mark.parametrize(("name", "kv_dtype"), thinned(product(CASES, KV_DTYPES), 70))
def test_logits_with_8_bit_keys_and_values_are_the_same_bits(
    name: str, kv_dtype: str, library: Library, pair: Pair
) -> None:
    check_bits(pair(name)[0], library, KV_DTYPES[kv_dtype])


def check_bits(path: Path, library: Library, kv_dtype: torch.dtype | None) -> None:
    tables = make_table(), make_table()
    with (
        built(path, library, table=tables[0], kv_dtype=kv_dtype) as first,
        built(path, library, table=tables[1], kv_dtype=kv_dtype) as second,
    ):
        steppers = iter([Stepper(first, tables[0]), Stepper(second, tables[1])])
        check_same_bits(lambda: next(steppers))


@pytest.mark.parametrize("name", EVERY)
def test_greedy_ids_are_those_of_the_dequantised_weights(name: str, pair: Pair) -> None:
    """In torch and float32; transformers has the dequantised weights."""
    quantised, plain = pair(name)
    prompts = make_prompts([5, 33])
    llm = make_llm(quantised, cpu_kernels="torch")

    outputs = ids(llm, prompts)

    oracle = Oracle(as_transformers(plain))
    for prompt, output in zip(prompts, outputs, strict=True):
        oracle.assert_greedy(prompt, output)
    llm.close()


def as_transformers(path: Path) -> Any:
    """Return transformers' model of a checkpoint without quantised weights."""
    if path.is_dir():
        return path
    options = {"gguf_file": path.name, "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
