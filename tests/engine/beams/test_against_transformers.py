"""Beam search of real models: sequences and scores are those of transformers' `generate`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from remora.engine.beams.params import BeamParams
from remora.engine.llm import LLM, Generation, SamplingParams
from remora.engine.types import FinishReason
from tests.conftest import TinyCheckpoints
from tests.thinned import thinned

PROMPTS = [list(range(3, 40)), [7, 8, 9], [11, 7, 8, 9, 11, 7, 8], list(range(3, 35))]
EOS = 2
STOPS = tuple(range(20, 60))  # a random model ends seldom, so some tokens more end it
COUNT = 18

Found = list[tuple[list[int], float]]
Judge = Callable[..., Found]

CASES = [
    {"width": width, "length_penalty": penalty, "early_stopping": early}
    for (width, penalty), early in zip(
        itertools.product((2, 3, 5, 8), (1.0, 0.0, -1.5, 2.0)),
        itertools.cycle([False, True, "never"]),
        strict=False,
    )
]


@pytest.fixture(scope="module")
def judge(tiny_checkpoints: TinyCheckpoints) -> Judge:
    """What transformers finds; once for each search, which all engines are compared with."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints("llama"), dtype=torch.float32)
    made: dict[str, Found] = {}

    def find(prompt: list[int], **search: Any) -> Found:
        key = repr((prompt, search))
        if key not in made:
            made[key] = expected(model, prompt, **search)
        return made[key]

    return find


@pytest.fixture(scope="module", params=["program", "torch"])
def llm(request: pytest.FixtureRequest, tiny_checkpoints: TinyCheckpoints) -> Iterator[LLM]:
    options: dict[str, Any] = {"cpu_kernels": "torch"} if request.param == "torch" else {}
    llm = LLM(
        str(tiny_checkpoints("llama")),
        kv_tokens=4096,
        page_size=16,
        max_running_requests=40,
        show_progress=False,
        dtype="float32",
        num_threads=1,
        **options,
    )
    yield llm
    llm._engine.check_integrity()
    assert llm.stats().num_held_pages == 0
    llm.close()


def params(
    *, width: int, n: int = 0, max_tokens: int = COUNT, stops: Sequence[int] = STOPS, **more: Any
) -> SamplingParams:
    names = BeamParams.__dataclass_fields__
    beams = BeamParams(width=width, **{k: v for k, v in more.items() if k in names})
    rest = {k: v for k, v in more.items() if k not in names}
    return SamplingParams(
        max_tokens=max_tokens, n=n or width, beams=beams, stop_token_ids=tuple(stops), **rest
    )


def found(generation: Generation) -> Found:
    return [(each.token_ids, each.score or 0.0) for each in generation.completions]


def expected(
    model: Any,
    prompt: list[int],
    *,
    width: int,
    n: int = 0,
    max_tokens: int = COUNT,
    stops: Sequence[int] = STOPS,
    **more: Any,
) -> Found:
    made = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=max_tokens,
        num_beams=width,
        num_return_sequences=n or width,
        do_sample=False,
        eos_token_id=[EOS, *stops],
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    ends = {EOS, *stops}
    sequences = []
    for sequence in made.sequences[:, len(prompt) :].tolist():
        stop = next((at for at, token in enumerate(sequence) if token in ends), len(sequence))
        sequences.append(sequence[: stop + 1])
    return list(zip(sequences, made.sequences_scores.tolist(), strict=True))


def same(got: Found, want: Found) -> bool:
    return [ids for ids, _ in got] == [ids for ids, _ in want] and all(
        score == pytest.approx(other, rel=1e-5, abs=2e-5)
        for (_, score), (_, other) in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("case", thinned(((case,) for case in CASES), 2), ids=str)
def test_outputs_and_scores_are_those_of_transformers(
    llm: LLM, judge: Judge, case: dict[str, Any]
) -> None:
    got = llm.generate(PROMPTS, params(**case))

    for prompt, generation in zip(PROMPTS, got, strict=True):
        assert same(found(generation), judge(prompt, **case)), prompt
    reasons = {each.finish_reason for answer in got for each in answer.completions}
    assert reasons <= {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"n": 1}, {"n": 1}),
        ({"n": 3, "stops": ()}, {"n": 3, "stops": ()}),
        ({"max_tokens": 1}, {"max_tokens": 1}),
        ({"max_tokens": 2}, {"max_tokens": 2}),
        ({"min_tokens": 6}, {"min_new_tokens": 6}),
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"bad_words_ids": ((11,), (7, 8))}, {"bad_words_ids": [[11], [7, 8]]}),
        ({"logit_bias": {9: 3.0}}, {"sequence_bias": [[[9], 3.0]]}),
    ],
    ids=str,
)
def test_other_parameters_apply_to_log_probabilities(
    llm: LLM, judge: Judge, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    got = llm.generate(PROMPTS, params(width=4, **ours))

    for prompt, generation in zip(PROMPTS, got, strict=True):
        assert same(found(generation), judge(prompt, width=4, **theirs)), prompt
