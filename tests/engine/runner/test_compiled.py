"""Decode steps through torch.compile: the same tokens, nothing compiled twice, nothing left unseen.

Compiling takes a machine of two cores some 15 s, so one engine serves most of these tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.planning.plan import make_plan
from remora.engine.llm import LLM, SamplingParams
from remora.engine.models.facts import read_model_facts
from remora.engine.runner import compiled
from remora.engine.runner.batch import ForwardBatch
from remora.engine.runner.compiled import CompiledModel
from remora.engine.runner.eager import make_batch
from remora.engine.runner.forward import build_forward
from remora.engine.runner.inputs import dummy_step
from remora.kernels.lora import RowGroups
from tests.conftest import TinyCheckpoints
from tests.engine.configured import MACHINE
from tests.engine.loaded import load_f32

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of inductor

MAX_ROWS = 3
PROMPTS = ["Hello", "One, two, three", "The quick brown fox jumps over", "x", "def add(a, b):"]
KEYS: dict[str, Any] = {
    "kv_tokens": 4096,
    "max_running_requests": 8,
    "num_threads": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def path(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def eager(path: Path) -> Iterator[LLM]:
    llm = LLM(str(path), cpu_kernels="torch", show_progress=False, **KEYS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def compiling(path: Path) -> Iterator[LLM]:
    keys: Any = {**KEYS, "compile": True, "compile_max_rows": MAX_ROWS, "cpu_kernels": "torch"}
    llm = LLM(str(path), show_progress=False, **keys)
    yield llm
    llm.close()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each layer that runs in compiled code."""
    seen: list[int] = []
    run = compiled._CompiledAttention.run

    def counting(self: Any, layer: int, heads: torch.Tensor, *angles: torch.Tensor) -> torch.Tensor:
        seen.append(len(heads))
        return run(self, layer, heads, *angles)

    monkeypatch.setattr(compiled._CompiledAttention, "run", counting)
    return seen


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=3, ignore_eos=True)


@pytest.mark.observes("engine.compile", "engine.compile_max_rows")
def test_tokens_are_those_of_the_plain_pass_whatever_the_number_of_rows(
    eager: LLM, compiling: LLM, rows: list[int]
) -> None:
    """Outputs end one after the other, so that steps have 5, 4, 3, 2 and 1 rows."""
    sampling = [greedy(8 * (number + 1)) for number in range(len(PROMPTS))]
    torch._dynamo.utils.counters.clear()

    wanted = eager.generate(PROMPTS, sampling)
    assert rows == []
    answers = compiling.generate(PROMPTS, sampling)

    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in wanted]
    for answer, other in zip(answers, wanted, strict=True):
        logprobs = [token.logprob for token in answer.logprobs or ()]
        others = [token.logprob for token in other.logprobs or ()]
        assert logprobs == pytest.approx(others, abs=1e-4)
    assert set(rows) == {1, 2, 3}
    assert not torch._dynamo.utils.counters["stats"], "something was compiled amid requests"


def test_nothing_is_left_for_the_slower_way_unseen(compiling: LLM, rows: list[int]) -> None:
    with torch.compiler.set_stance("fail_on_recompile"):
        compiling.generate(PROMPTS[:2], greedy(4))

    assert rows


class Branching:
    """A model that torch.compile cannot take as a whole."""

    vocab_size = 8

    def forward(self, batch: Any, attention: Any) -> torch.Tensor:
        hidden = torch.ones(batch.token_ids.shape[0], 2)
        return hidden if int(batch.token_ids.sum()) > 0 else -hidden


@pytest.fixture
def batch() -> ForwardBatch:
    inputs = dummy_step(2, 2, 1)
    return make_batch(inputs, page_size=16, device=torch.device("cpu"))


def test_a_model_that_cannot_be_compiled_as_a_whole_is_refused(batch: ForwardBatch) -> None:
    model = CompiledModel(Branching(), None, 4)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=r"engine\.compile = true"):
        model.compile(batch)


class Adding:
    """A model whose output is its weight, for each token."""

    vocab_size = 8

    def __init__(self, weight: float) -> None:
        self._weight = torch.tensor(weight)

    def forward(self, batch: Any, attention: Any) -> torch.Tensor:
        made: torch.Tensor = self._weight + batch.token_ids
        return made


def test_models_of_one_process_do_not_run_each_others_code(batch: ForwardBatch) -> None:
    models = [CompiledModel(Adding(weight), None, 4) for weight in (1.0, 2.0)]  # type: ignore[arg-type]
    for model in models:
        model.compile(batch)

    results = [model.forward(batch, None).tolist() for model in models]  # type: ignore[arg-type]

    assert results == [[1.0, 1.0], [2.0, 2.0]]


def test_without_a_compiler_the_start_says_what_is_missing(
    batch: ForwardBatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = CompiledModel(Adding(1.0), None, 4)  # type: ignore[arg-type]

    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigError, match=r"No working C\+\+ compiler"),
    ):
        model.compile(batch)


def test_rows_with_adapters_and_large_steps_run_uncompiled(batch: ForwardBatch) -> None:
    model = CompiledModel(Branching(), None, 2)  # type: ignore[arg-type]
    model._pass = lambda token_ids, positions: torch.zeros(len(token_ids), 2)
    adapted = replace(batch, adapters=RowGroups(((0, torch.tensor([1])),)))
    large = make_batch(dummy_step(3, 3, 1), page_size=16, device=torch.device("cpu"))

    is_compiled = [
        not model.forward(step, None).any()  # type: ignore[arg-type]
        for step in (batch, adapted, large, replace(batch, num_decodes=1))
    ]

    assert is_compiled == [True, False, False, False]


def build(path: Path, sections: Any) -> None:
    machine = replace(MACHINE, available_bytes=2**33)
    plan = make_plan(parse_args(sections), read_model_facts(path), machine, path)
    model = load_f32(path)
    build_forward(model, plan, None, path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"engine": {"cpu_kernels": "native"}}, "native kernels are compiled already"),
        ({"engine": {"deterministic": True}}, "engine.deterministic"),
        ({"parallel": {"tp_size": 2}}, "engine.compile"),
        (
            {"engine": {"cpu_kernels": "torch"}, "model": {"quantization": "int8"}},
            "needs the native CPU kernels",
        ),
    ],
)
def test_what_contradicts_it_is_refused(path: Path, sections: Any, reason: str) -> None:
    sections["model"] = {"path": str(path)} | sections.get("model", {})
    sections["engine"] = {**KEYS, "compile": True} | sections.get("engine", {})

    with pytest.raises(ConfigError, match=reason):
        build(path, sections)


def test_native_kernels_come_first(path: Path, rows: list[int]) -> None:
    llm = LLM(str(path), compile=True, cpu_kernels="auto", show_progress=False, **KEYS)
    try:
        llm.generate(PROMPTS[:1], greedy(2))
    finally:
        llm.close()
    assert rows == []


def test_a_limit_without_compiling_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compile_max_rows = 4: needs compile"):
        parse_args({"model": {"path": "x"}, "engine": {"compile_max_rows": 4}})
