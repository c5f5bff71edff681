"""Prompts given as embeddings: those of the model's own table are as good as the ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from remora.configs.errors import InvalidRequest, PromptTooLong
from remora.engine.llm import LLM, BeamParams, Generation, Prompt, SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.models.families import make_family

Rows = npt.NDArray[np.float32]
PLAIN = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2)
PROMPTS = [list(range(3, 36)), [7, 8, 9], [11], list(range(5, 60))]


@pytest.fixture(scope="module")
def llama(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(scope="module")
def llm(llama: Path) -> Iterator[LLM]:
    llm = make_llm(llama)
    yield llm
    llm.close()


def make_llm(path: Path, **options: Any) -> LLM:
    common: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "show_progress": False}
    return LLM(str(path), **(common | {"kv_tokens": 1024} | options))


def rows_of(path: Path, ids: list[int], name: str = "model.embed_tokens.weight") -> Rows:
    """Return rows of a checkpoint's table, as a client would look them up."""
    table: torch.Tensor = load_file(path / "model.safetensors")[name]
    found: Rows = table[ids].float().numpy()
    return found


def values(found: Generation) -> Any:
    assert found.logprobs is not None
    scores = [(each.token_id, each.logprob) for each in found.logprobs]
    return found.token_ids, found.text, found.finish_reason, scores


OPTIONS: list[dict[str, Any]] = [
    {"cpu_kernels": "torch"},
    {"cpu_kernels": "native"},
    {"cpu_kernels": "native", "dtype": "bfloat16"},
    {"cpu_kernels": "native", "dtype": "bfloat16", "quantization": "int8"},
    {"cpu_kernels": "torch", "dtype": "bfloat16"},
    {"cpu_kernels": "torch", "prefill_chunk_tokens": 8},
    {"cpu_kernels": "native", "prefill_chunk_tokens": 8, "max_step_tokens": 16},
]


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: "-".join(map(str, options.values()))
)
def test_rows_of_the_table_are_as_good_as_ids(llama: Path, options: dict[str, Any]) -> None:
    given = [rows_of(llama, ids) for ids in PROMPTS]
    llm, other = make_llm(llama, **options), make_llm(llama, **options)

    for num_cached in (0, 32):  # the second time the prefix cache holds the prompts
        expected = llm.generate(PROMPTS, PLAIN)
        found = other.generate(given, PLAIN)
        assert [values(each) for each in found] == [values(each) for each in expected]
        assert [each.prompt_token_ids for each in found] == [[]] * len(PROMPTS)
        assert found[0].num_cached_tokens == num_cached
    llm.close()
    other.close()


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_preempted_prompt_is_computed_again_from_its_rows(llama: Path, kernels: str) -> None:
    prompts = [list(range(first, first + 40)) for first in range(3, 9)]
    # Without `ignore_eos`: the scheduler would know their length.
    params = SamplingParams(max_tokens=100, temperature=0.0)
    options = {"cpu_kernels": kernels, "prefix_cache": False}
    expected = make_llm(llama, **options).generate(prompts, params)
    tight = make_llm(llama, kv_tokens=256, schedule_conservativeness=0.05, **options)

    found = tight.generate([rows_of(llama, ids) for ids in prompts], params)

    assert tight.stats().preemptions_total > 0
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def test_they_run_in_the_same_steps_as_ids(llm: LLM, llama: Path) -> None:
    expected = llm.generate(PROMPTS, PLAIN)
    mixed: list[Prompt] = [
        rows_of(llama, PROMPTS[0]),
        PROMPTS[1],
        rows_of(llama, PROMPTS[2]),
        PROMPTS[3],
    ]

    found = llm.generate(mixed, PLAIN)

    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [len(each.prompt_token_ids) for each in found] == [0, 3, 0, 55]


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_rows_come_before_a_factor_and_before_learned_positions(
    family: str, kernels: str, tmp_path: Path
) -> None:
    path, _ = make_family(tmp_path, family)
    name = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    llm = make_llm(path, cpu_kernels=kernels)
    ids = list(range(3, 30))

    (expected,) = llm.generate([ids], PLAIN)
    (found,) = llm.generate([rows_of(path, ids, name)], PLAIN)

    assert values(found) == values(expected)


def test_other_rows_give_another_output_and_share_no_pages(llm: LLM, llama: Path) -> None:
    rows = rows_of(llama, PROMPTS[0])
    (first,) = llm.generate([rows], PLAIN)
    changed = rows.copy()
    changed[5] *= -3

    (other,) = llm.generate([changed], PLAIN)
    (again,) = llm.generate([rows], PLAIN)
    (zeros,) = llm.generate([[0] * len(rows)], PLAIN)

    assert other.num_cached_tokens == zeros.num_cached_tokens == 0
    assert again.num_cached_tokens == 32
    assert values(again)[0] == values(first)[0] != values(other)[0]


def test_several_outputs_share_the_prompt(llama: Path) -> None:
    params = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=5, ignore_eos=True)
    expected = make_llm(llama).generate([PROMPTS[0]], params)[0]

    found = make_llm(llama).generate([rows_of(llama, PROMPTS[0])], params)[0]

    assert [each.token_ids for each in found.completions] == [
        each.token_ids for each in expected.completions
    ]


def test_beams_begin_with_them_too(llama: Path) -> None:
    params = SamplingParams(max_tokens=6, n=2, beams=BeamParams(width=3), ignore_eos=True)
    expected = make_llm(llama).generate([PROMPTS[0]], params)[0]

    found = make_llm(llama).generate([rows_of(llama, PROMPTS[0])], params)[0]

    assert [each.token_ids for each in found.completions] == [
        each.token_ids for each in expected.completions
    ]


def test_penalties_count_the_output_only(llm: LLM, llama: Path) -> None:
    heavy = SamplingParams(max_tokens=6, temperature=0.0, repetition_penalty=50.0, ignore_eos=True)
    plain = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    first = llm.generate([PROMPTS[1]], plain)[0].token_ids[0]
    prompt = [first, *PROMPTS[1]]
    likeliest = llm.generate([prompt], plain)[0].token_ids[0]
    said = [likeliest, *prompt]
    wanted = llm.generate([said], plain)[0].token_ids[0]

    by_ids = llm.generate([[wanted, *said]], heavy)[0].token_ids
    by_rows = llm.generate([rows_of(llama, [wanted, *said])], heavy)[0].token_ids

    unpenalised = llm.generate([[wanted, *said]], plain)[0].token_ids[0]
    assert by_rows[0] == unpenalised
    assert len({*by_rows}) == len(by_rows)
    assert by_ids[0] not in [wanted, *said]


def test_they_have_no_drafts(llama: Path) -> None:
    llm = make_llm(llama, speculation={"method": "ngram", "max_drafts": 3})
    prompt = [5, 6, 7, 8] * 8
    (expected,) = make_llm(llama).generate([prompt], PLAIN)

    (found,) = llm.generate([rows_of(llama, prompt)], PLAIN)

    assert found.token_ids == expected.token_ids
    assert llm.stats().draft_tokens_total == 0


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (np.zeros((3, 63), np.float32), r"shape 3 x 63; it must be \[tokens, 96\]"),
        (np.full((3, 96), np.nan, np.float32), "not finite in the model's format, float32"),
        (np.full((3, 96), np.inf, np.float32), "not finite"),
    ],
    ids=["width", "nan", "infinite"],
)
def test_bad_rows_are_refused_with_advice(llm: LLM, rows: Rows, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        llm.generate([rows], PLAIN)


def test_what_needs_ids_is_refused(llm: LLM, llama: Path) -> None:
    rows = rows_of(llama, PROMPTS[0])

    with pytest.raises(InvalidRequest, match="log-probabilities of the prompt"):
        llm.generate([rows], SamplingParams(max_tokens=2, prompt_logprobs=1))
    with pytest.raises(PromptTooLong):
        llm.generate([np.zeros((2000, 96), np.float32)], PLAIN)
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate([rows[:0]], PLAIN)
