"""Beam search together with constraints, adapters, drafts, ranks and KV in 8 bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from remora.engine.beams.params import BeamParams
from remora.engine.grammar.constraint import Constraint, ConstraintKind
from remora.engine.llm import LLM, Generation, SamplingParams
from remora.engine.types import FinishReason
from remora.lora.setup import pooling
from tests.conftest import TinyCheckpoints
from tests.engine.beams.plain_search import Scores, plain_search
from tests.engine.parallel.runs import run
from tests.lora.adapters import make_adapter

PROMPTS = [list(range(3, 40)), [7, 8, 9]]
EOS = 2
WORDS = Constraint(kind=ConstraintKind.REGEX, source="(?:[a-z]{2,4} ){1,2}[.!]")
BEAMS = BeamParams(width=4)


def make_llm(path: Path, **options: Any) -> LLM:
    common: dict[str, Any] = {
        "show_progress": False,
        "dtype": "float32",
        "num_threads": 1,
        "kv_tokens": 4096,
        "max_running_requests": 24,
    }
    return LLM(str(path), **(common | options))


def outputs(generations: list[Generation]) -> list[list[list[int]]]:
    return [[each.token_ids for each in answer.completions] for answer in generations]


def scores_of(model: Any, context: list[int]) -> Scores:
    with torch.no_grad():
        logits = model(torch.tensor([context])).logits[0, -1]
    scores: Scores = torch.log_softmax(logits.float(), dim=-1).numpy().copy()
    return scores


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    "beams",
    [
        BeamParams(width=4, num_groups=2, diversity_penalty=0.8),
        BeamParams(width=6, num_groups=3, diversity_penalty=2.0, early_stopping=True),
        BeamParams(width=4, num_groups=4, diversity_penalty=0.3, length_penalty=0.0),
    ],
    ids=str,
)
def test_diverse_beams_of_a_model_are_those_of_a_plain_search(
    beams: BeamParams, kernels: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama")
    llm = make_llm(path, cpu_kernels=kernels)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    stops = {EOS, *range(20, 60)}
    params = SamplingParams(
        max_tokens=10, n=beams.width, beams=beams, stop_token_ids=tuple(stops - {EOS})
    )

    answers = llm.generate(PROMPTS, params)

    for prompt, answer in zip(PROMPTS, answers, strict=True):

        def next_scores(context: list[int]) -> Scores:
            return scores_of(model, context)

        wanted = plain_search(next_scores, prompt, beams, stop_ids=stops, max_tokens=10)
        assert [each.token_ids for each in answer.completions] == [ids for ids, _ in wanted]
        assert [each.score for each in answer.completions] == pytest.approx(
            [score for _, score in wanted], rel=1e-5, abs=2e-5
        )
    llm.close()


def test_a_constraint_masks_each_beam_by_its_own_output(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("llama")
    llm, model = make_llm(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    params = SamplingParams(max_tokens=20, n=4, beams=BEAMS)

    answers = llm.generate(PROMPTS, params, constraint=WORDS)

    grammar = llm._compile(WORDS)
    for prompt, answer in zip(PROMPTS, answers, strict=True):

        def next_scores(context: list[int], known: int = len(prompt)) -> Scores:
            matcher = grammar.matcher()
            assert all(map(matcher.accept, context[known:]))
            scores = scores_of(model, context)
            words = np.zeros(-(-len(scores) // 32), np.int32)
            matcher.fill(words)
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(scores)]
            scores[allowed == 0] = -np.inf
            return scores

        wanted = plain_search(next_scores, prompt, BEAMS, stop_ids={EOS}, max_tokens=20)
        assert [each.token_ids for each in answer.completions] == [ids for ids, _ in wanted]
        assert [each.score for each in answer.completions] == pytest.approx(
            [score for _, score in wanted], abs=2e-5
        )
        for each in answer.completions:
            is_whole = re.fullmatch(WORDS.source, each.text) is not None
            assert is_whole or each.finish_reason is FinishReason.LENGTH
    llm.close()


def test_a_constraint_with_few_outputs_leaves_the_others_empty(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    llm = make_llm(tiny_checkpoints("llama"))
    either = Constraint(kind=ConstraintKind.REGEX, source="yes|no")

    (answer,) = llm.generate(
        PROMPTS[1], SamplingParams(max_tokens=20, n=4, beams=BEAMS), constraint=either
    )

    texts = [each.text for each in answer.completions]
    assert {*texts} >= {"yes", "no"}
    assert all((each.score is None) == (not each.text) for each in answer.completions)
    assert llm.stats().num_held_pages == 0
    llm.close()


def test_adapters_have_beams_of_their_own(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("llama")
    adapted = make_adapter(path, tmp_path / "a", r=8, target_modules=["q_proj", "up_proj"])
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    llm = make_llm(path, adapting=pooling({"a": tmp_path / "a"}, num_slots=1))
    params = SamplingParams(max_tokens=10, n=2, beams=BEAMS)

    answers = llm.generate([PROMPTS[0]] * 2, params, adapter=["a", None])

    llm._engine.check_integrity()
    for model, answer in ((adapted, answers[0]), (base, answers[1])):
        made = model.generate(
            input_ids=torch.tensor([PROMPTS[0]]),
            max_new_tokens=10,
            num_beams=4,
            num_return_sequences=2,
            do_sample=False,
            pad_token_id=0,
        )[:, len(PROMPTS[0]) :].tolist()
        for each, wanted in zip(answer.completions, made, strict=True):
            assert each.token_ids == wanted[: len(each.token_ids)]
            assert set(wanted[len(each.token_ids) :]) <= {0}
    llm.close()


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": {"method": "ngram", "max_drafts": 4, "adaptive": False}},
        {"prefix_cache": False},
        {"cpu_kernels": "torch", "kv_dtype": "int8"},
        {"kv_dtype": "int8"},
    ],
    ids=str,
)
def test_others_in_the_same_steps_change_nothing(
    options: dict[str, Any], tiny_checkpoints: TinyCheckpoints
) -> None:
    alone = {key: value for key, value in options.items() if key in ("kv_dtype", "cpu_kernels")}
    path = tiny_checkpoints("llama")
    llm, plain = make_llm(path, **options), make_llm(path, **alone)
    searched = SamplingParams(max_tokens=12, n=4, beams=BEAMS, logprobs=2)
    drawn = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)

    got = llm.generate(
        [PROMPTS[0], [5, 6, 7] * 4, PROMPTS[1], [5, 6, 7] * 4], [searched, drawn, searched, drawn]
    )

    want = plain.generate(PROMPTS, searched)
    assert outputs([got[0], got[2]]) == outputs(want)
    assert got[1].token_ids == got[3].token_ids
    if "speculation" in options:
        assert llm.stats().draft_tokens_total > 0
    for answer in (got[0], got[2]):
        for each in answer.completions:
            assert each.logprobs is not None
            assert each.score is not None
            assert [line.token_id for line in each.logprobs] == each.token_ids
            total = sum(line.logprob for line in each.logprobs)
            assert total / len(each.token_ids) == pytest.approx(each.score, abs=1e-5)
    for model in (llm, plain):
        assert model.stats().num_held_pages == 0
        model.close()


@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"pp_size": 2, "micro_batches": 2}], ids=str)
def test_ranks_search_as_one_does(ranks: dict[str, int], tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("llama")
    params = SamplingParams(max_tokens=10, beams=BEAMS)
    requests = {"a": (PROMPTS[0], params), "b": (PROMPTS[1], params)}

    one = run(path, requests, max_running_requests=12)
    more = run(path, requests, max_running_requests=12, **ranks)

    assert one.token_ids == more.token_ids
    assert all(one.token_ids.values())
