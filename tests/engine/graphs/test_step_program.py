"""Whole models as step programs: beside torch's, and bit by bit however the work is cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remora.configs.environment import cache_dir
from remora.engine.attention import TorchAttention
from remora.engine.eager import EagerForward
from remora.engine.forward import QUANTIZED_FORMATS
from remora.engine.graphs.step_program import StepProgramBuilder, StepShape
from remora.engine.inputs import RowTable
from remora.engine.llm import LLM, SamplingParams
from remora.engine.models.registry import load_model
from remora.engine.protocols import ForwardPass
from remora.engine.types import RowInit, StepPlan
from remora.kernels.cpu.build import NativeUnavailable, load_library
from remora.kernels.cpu.library import Format, Library, Team
from tests.conftest import TinyCheckpoints
from tests.engine.test_parity import make_prompts
from tests.kernels.cpu.products import pack_alone, unpack

PAGE_SIZE, MAX_TOKENS, MAX_ROWS, NUM_PAGES = 16, 256, 4, 64
MODES = {"none": (Format.BF16, Format.BF16), **QUANTIZED_FORMATS}
# Norm of what the logits differ by, as a share of their own: what rounding activations costs these
# small models, which blow up what goes in.
ERRORS = {"none": 0.08, "int8": 0.2, "int4": 0.2}


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return Library(load_library(cache_dir() / "kernels"))
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


class Stepper:
    """A forward pass and rows of random tokens on it."""

    def __init__(self, forward: ForwardPass, table: RowTable) -> None:
        self.forward = forward
        self._table = table
        self._done: dict[int, int] = {}
        self._pages = iter(np.random.default_rng(0).permutation(NUM_PAGES) + 1)

    def step(self, counts: dict[int, int]) -> Tensor:
        """Compute so many tokens more of each row; return their last logits."""
        rows = sorted(counts, key=lambda row: counts[row] > 1)
        added = tuple(self._start(row) for row in rows if row not in self._done)
        pages = [
            (row, next(self._pages)) for row in rows for _ in range(self._lacking(row, counts))
        ]
        for init in added:
            self._table.start(init)
        page_rows, page_ids = np.array(pages, dtype=np.int32).reshape(-1, 2).T
        self._table.add_pages(page_rows, page_ids)
        inputs = self._table.inputs(
            StepPlan(
                step_id=0,
                added=added,
                dropped=np.empty(0, np.int32),
                page_rows=page_rows,
                page_ids=page_ids,
                rows=np.array(rows, np.int32),
                starts=np.array([self._done[row] for row in rows], np.int32),
                num_tokens=np.array([counts[row] for row in rows], np.int32),
                samples=np.ones(len(rows), np.bool_),
            )
        )
        logits = self.forward.forward(inputs)
        for row in rows:
            self._done[row] += counts[row]
        return logits.clone()

    def _lacking(self, row: int, counts: dict[int, int]) -> int:
        done = self._done[row]
        return -(-(done + counts[row]) // PAGE_SIZE) - -(-done // PAGE_SIZE)

    def _start(self, row: int) -> RowInit:
        self._done[row] = 0
        tokens = np.random.default_rng(row).integers(10, 250, 200)
        return RowInit(
            row=row, token_ids=tokens, num_prompt_tokens=200, seed=0, sampling=SamplingParams()
        )


def make_table() -> RowTable:
    return RowTable(max_rows=MAX_ROWS, max_tokens=MAX_TOKENS, page_size=PAGE_SIZE)


def make_native(
    path: Path, library: Library, mode: str = "none", dtype: torch.dtype = torch.bfloat16
) -> Stepper:
    model = load_model(path, dtype=dtype, load_format="auto", device="cpu", show_progress=False)
    table = make_table()
    layers, head = MODES[mode]
    shape = StepShape(
        max_tokens=MAX_TOKENS,
        max_rows=MAX_ROWS,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_positions=MAX_TOKENS,
    )
    program = StepProgramBuilder(
        model, Team(library, 2), shape, table, layer_format=layers, head_format=head
    ).build()
    return Stepper(program, table)


def make_eager(path: Path, library: Library, mode: str) -> Stepper:
    """Run in float32, in torch, with the weights that the mode's rounding leaves."""
    model = load_model(
        path, dtype=torch.float32, load_format="auto", device="cpu", show_progress=False
    )
    config = model.config
    layer_format, head_format = MODES[mode]
    team = Team(library, 1)
    for block in model.blocks:
        heads, mlp = block.attention, block.mlp
        for linear in (heads.qkv_proj, heads.o_proj, mlp.gate_up_proj, mlp.down_proj):
            linear.weight = rounded(team, linear.weight, layer_format)
    model.head.linear.weight = rounded(team, model.head.linear.weight, head_format)
    team.close()
    attention = TorchAttention(
        num_layers=config.num_layers,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    return Stepper(EagerForward(model, attention, page_size=PAGE_SIZE), make_table())


def rounded(team: Team, weight: Tensor, format: Format) -> Tensor:
    return unpack(pack_alone(team, weight.bfloat16(), None, format)).values.float()


@pytest.mark.parametrize("family", ["llama", "llama-bias", "mistral", "qwen3"])
@pytest.mark.parametrize("mode", MODES)
def test_logits_are_close_to_those_of_torch_with_the_same_weights(
    mode: str, family: str, library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints(family)
    native = make_native(path, library, mode)
    exact = make_eager(path, library, mode)

    for counts in ({0: 30, 1: 70}, {0: 1, 1: 1, 2: 20}):
        expected = exact.step(counts)
        error = (native.step(counts) - expected).norm() / expected.norm()
        assert error < ERRORS[mode]
    native.forward.close()


@pytest.mark.parametrize("mode", MODES)
def test_logits_asked_for_afterwards_are_those_of_the_step(
    mode: str, library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    native = make_native(tiny_checkpoints("llama"), library, mode)

    last = native.step({0: 40, 1: 30})
    again = native.forward.logits(30, 70).clone()

    # Rows come in order, and the last logits of each were asked for in the step.
    assert torch.equal(native.forward.logits(39, 40), last[:1])
    assert torch.equal(again[-1:], last[1:])
    assert torch.equal(again[9:10], last[:1])
    native.forward.close()


@pytest.mark.parametrize("mode", MODES)
def test_logits_are_the_same_bits_in_chunks_and_company(
    mode: str, library: Library, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama")
    whole = make_native(path, library, mode)
    expected = whole.step({0: 100})
    cut = make_native(path, library, mode)

    for counts in ({0: 33, 1: 17}, {2: 1, 0: 1, 1: 5}, {1: 1, 0: 66}):
        cut.step(counts)

    assert torch.equal(cut.step({3: 20, 0: 1})[:1], whole.step({0: 1}))
    assert expected.isfinite().all()
    for stepper in (whole, cut):
        stepper.forward.close()


def test_closing_twice_is_closing_once(library: Library, tiny_checkpoints: TinyCheckpoints) -> None:
    native = make_native(tiny_checkpoints("llama"), library)
    native.step({0: 3})

    native.forward.close()
    native.forward.close()


GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=2)
CUTS: dict[str, dict[str, Any]] = {
    "chunks of 7": {"prefill_chunk_tokens": 7, "max_step_tokens": 40},
    "unchunked": {"prefill_chunk_tokens": 512, "max_step_tokens": 1024},
    "two threads": {"num_threads": 2},
    "pages of 64": {"page_size": 64},
    "no prefix cache": {"prefix_cache": False},
}


def make_llm(path: Path, mode: str, **options: Any) -> LLM:
    common: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_tokens": 4096,
        "num_threads": 1,
        "show_progress": False,
    }
    return LLM(str(path), quantization=mode, cpu_kernels="native", **(common | options))


def generate(llm: LLM, prompts: list[list[int]]) -> Iterator[tuple[list[int], list[float]]]:
    """Yield ids and log-probabilities, which show every bit of the logits."""
    for generation in llm.generate(prompts, GREEDY):
        assert generation.logprobs is not None
        yield generation.token_ids, [line.logprob for line in generation.logprobs]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("mode", MODES)
def test_generation_is_the_same_to_the_bit_however_the_work_is_cut(
    mode: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama")
    prompts = make_prompts([3, 17, 40, 80, 64, 31])
    llm = make_llm(path, mode, prefix_cache=False)
    expected = [next(generate(llm, [prompt])) for prompt in prompts]

    for name, options in CUTS.items():
        cut = make_llm(path, mode, **options)
        assert list(generate(cut, prompts)) == expected, name
        assert list(generate(cut, prompts[::-1])) == expected[::-1], f"{name}, cached"
        cut.close()
    llm.close()
