"""Beams that a text ends, as transformers' `stop_strings` end them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from remora.engine.beams.params import BeamParams
from remora.engine.llm import LLM, SamplingParams
from remora.engine.types import FinishReason, Request
from tests.conftest import TinyCheckpoints
from tests.engine.beams.fake_beams import BeamRunner, next_scores
from tests.engine.beams.plain_search import plain_search
from tests.engine.scheduler.scheduled import Harness

EOS = 0
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


class LetterTokenizer:
    """Each token is one or two letters, so that texts end within tokens and span them."""

    special_ids = frozenset({EOS})

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join("abcd"[each % 4] + "xyz"[each % 3] * (each % 2) for each in ids)


LETTERS = LetterTokenizer()


@settings(max_examples=100)
@given(
    stop=st.lists(st.text("abcdxyz", min_size=1, max_size=3), max_size=3),
    stop_regex=st.lists(st.sampled_from(["[xy]b", "cc?a", "dz[ab]d"]), max_size=1),
    min_tokens=st.integers(0, 3),
    max_tokens=st.integers(3, 12),
    width=st.sampled_from([2, 4, 8]),
    num_groups=st.sampled_from([1, 2]),
    early_stopping=st.sampled_from([True, False, "never"]),
    length_penalty=st.sampled_from([1.0, 0.0, -1.0]),
    overlap=st.booleans(),
)
def test_a_text_ends_a_beam_as_a_plain_search_says(
    stop: list[str],
    stop_regex: list[str],
    min_tokens: int,
    max_tokens: int,
    overlap: bool,
    **beams: Any,
) -> None:
    params = BeamParams(**beams, diversity_penalty=0.7 if beams["num_groups"] > 1 else 0.0)
    sampling = SamplingParams(
        stop=tuple(stop),
        stop_regex=tuple(stop_regex),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        n=params.width,
        beams=params,
    )
    pattern = re.compile("|".join([*map(re.escape, stop), *stop_regex]) or "(?!)")

    def ends(output: list[int]) -> bool:
        text = LETTERS.decode(output[min_tokens:], skip_special_tokens=False)
        return pattern.search(text) is not None

    harness = Harness(
        runner=BeamRunner(4),
        tokenizer=LETTERS,
        overlap=overlap,
        max_running_requests=10,
        num_pages=64,
    )
    harness.engine.add(Request(request_id="a", prompt_ids=PROMPT, sampling=sampling))
    harness.run()

    wanted = plain_search(
        next_scores, PROMPT, params, stop_ids={EOS}, max_tokens=max_tokens, ends=ends
    )
    assert wanted
    for index, (output, _) in enumerate(wanted):
        assert harness.tokens["a", index] == output
        has_stopped = output[-1] == EOS or ends(output)
        reason = FinishReason.STOP if has_stopped else FinishReason.LENGTH
        assert harness.ends["a", index] is reason
        assert harness.stops["a", index] == (EOS if output[-1] == EOS else None)
    assert harness.engine.stats().num_held_pages == 0


STOPS = ("e", "th", " a", "o")
PROMPTS = [list(range(3, 40)), [7, 8, 9], [11, 7, 8, 9, 11, 7, 8]]


@pytest.mark.parametrize(
    "beams",
    [
        {"width": 2},
        {"width": 4, "length_penalty": 0.0, "early_stopping": True},
        {"width": 5, "length_penalty": -1.5},
        {"width": 8, "length_penalty": 0.5, "early_stopping": "never"},
    ],
    ids=str,
)
def test_outputs_and_scores_are_those_of_transformers(
    beams: dict[str, Any], tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    llm = LLM(str(path), show_progress=False, dtype="float32", num_threads=1, kv_tokens=4096)
    width = beams["width"]
    common = {"max_tokens": 18, "n": width, "beams": BeamParams(**beams)}

    shown = llm.generate(PROMPTS, SamplingParams(**common, stop=STOPS, include_stop_in_output=True))
    cut = llm.generate(PROMPTS, SamplingParams(**common, stop=STOPS))

    stopped = 0
    for prompt, answer, other in zip(PROMPTS, shown, cut, strict=True):
        theirs = {key: value for key, value in beams.items() if key != "width"}
        made = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=18,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            pad_token_id=0,
            stop_strings=list(STOPS),
            tokenizer=tokenizer,
            return_dict_in_generate=True,
            output_scores=True,
            **theirs,
        )
        rows = made.sequences[:, len(prompt) :].tolist()
        for each, same, row, score in zip(
            answer.completions, other.completions, rows, made.sequences_scores.tolist(), strict=True
        ):
            assert each.token_ids == row[: len(each.token_ids)]
            assert set(row[len(each.token_ids) :]) <= {0, 2}  # what fills rows
            assert each.score == pytest.approx(score, rel=1e-5, abs=2e-5)
            assert (same.token_ids, same.score) == (each.token_ids, each.score)
            assert not any(stop in same.text for stop in STOPS)
            if each.stop_reason is not None:
                stopped += 1
                assert each.finish_reason is FinishReason.STOP
                assert each.text == same.text + str(each.stop_reason)
    assert stopped > width
    assert llm.stats().num_held_pages == 0
    llm.close()
