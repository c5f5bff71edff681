"""Drafts change how many tokens a step yields, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings

from remora.configs.errors import ConfigError
from remora.engine.types import FinishReason, Request, SamplingParams
from tests.engine.fakes import expected_output, make_window_room
from tests.engine.scheduler.scheduled import Harness
from tests.engine.scheduler.test_scheduler import SchedulerMachine
from tests.engine.spec.proposers import (
    GUESSES,
    Guess,
    any_of_them,
    make_speculation,
    oracle,
)


class DraftingMachine(SchedulerMachine):
    """Arrivals, steps and aborts in any order, in little memory, with all kinds of drafts."""

    def make_harness(self, **plan: Any) -> Harness:
        return super().make_harness(speculation=make_speculation(any_of_them), **plan)


class WindowedDraftingMachine(DraftingMachine):
    """The same with few pages for window layers."""

    windows = make_window_room(num_pages=6)


TestDraftingMachine = DraftingMachine.TestCase
TestDraftingMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestWindowedDraftingMachine = WindowedDraftingMachine.TestCase
TestWindowedDraftingMachine.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None
)


def request(name: str, prompt: list[int], **sampling: Any) -> Request:
    params = SamplingParams(temperature=0.0, **sampling)
    return Request(request_id=name, prompt_ids=prompt, sampling=params)


def cut_at(tokens: list[int], stops: list[int]) -> list[int]:
    """Tokens up to the first that is one of `stops`."""
    ends = [place for place, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("guess", GUESSES)
def test_tokens_lines_and_ends_are_those_without_drafts(guess: Guess) -> None:
    rng = random.Random(guess.__name__)
    for case in range(200):
        harness = Harness(
            speculation=make_speculation(guess, rng.randrange(1, 7)),
            num_pages=rng.choice([8, 12, 32]),
            max_step_tokens=rng.randrange(8, 24),
            page_size=4,
        )
        wanted: dict[str, Request] = {}
        for number in range(rng.randrange(1, 7)):
            prompt = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 12))]
            count = rng.randrange(1, 16)
            stops = rng.choice([[], rng.choices(expected_output(prompt, count), k=1)])
            name = f"{case}-{number}"
            wanted[name] = request(
                name, prompt, max_tokens=count, stop_token_ids=tuple(stops), logprobs=0
            )
            harness.engine.add(wanted[name])
            harness.step(rng.randrange(3))
        harness.run()
        for name, each in wanted.items():
            most = each.sampling.max_tokens
            assert most is not None
            stops = list(each.sampling.stop_token_ids)
            tokens = cut_at(expected_output(list(each.prompt_ids), most), stops)
            is_stopped = tokens[-1] in stops
            key = name, 0
            assert harness.tokens[key] == harness.described[key] == tokens
            assert harness.stops[key] == (tokens[-1] if is_stopped else None)
            assert harness.ends[key] == (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        stats = harness.engine.stats()
        assert stats.num_held_pages == 0
        assert stats.generated_tokens_total == sum(map(len, harness.tokens.values()))


def test_right_drafts_save_steps_and_are_counted() -> None:
    harness = Harness(speculation=make_speculation(oracle, 3))
    harness.add("a", [1, 2, 1], 10)

    harness.run()

    assert harness.tokens["a", 0] == expected_output([1, 2, 1], 10)
    # The prompt's step yields 1 token, then 1 + 3, 1 + 3, and the last one without drafts.
    assert [plan.num_tokens.tolist() for plan in harness.runner.plans] == [[3], [4], [4], [1]]
    stats = harness.engine.stats()
    assert (stats.drafted_rows_total, stats.draft_tokens_total) == (2, 6)
    assert stats.accepted_drafts_total == 6


def test_a_stopped_output_leaves_nothing_of_later_drafts_in_the_cache() -> None:
    prompt = [1, 2, 1, 2]
    output = expected_output(prompt, 12)
    harness = Harness(speculation=make_speculation(oracle, 6))
    harness.engine.add(request("a", prompt, max_tokens=12, stop_token_ids=(output[6],)))
    harness.run()

    assert harness.tokens["a", 0] == output[:7]
    assert harness.engine.stats().num_cached_pages == (len(prompt) + 6) // 4


def test_drafts_take_free_pages_only() -> None:
    # Five pages, and a cached prompt in four of them: a drafting row must not evict it.
    harness = Harness(speculation=make_speculation(oracle, 4), num_pages=6, max_model_len=64)
    harness.add("old", [1] * 16, 1)
    harness.run()
    assert harness.engine.stats().num_cached_pages == 4

    harness.add("new", [2, 2, 2], 4)
    harness.run()

    assert harness.engine.stats().evicted_pages_total == 0
    assert harness.tokens["new", 0] == expected_output([2, 2, 2], 4)


def test_drafts_take_what_prompts_leave_of_a_step() -> None:
    harness = Harness(
        speculation=make_speculation(oracle, 4), max_step_tokens=10, prefill_chunk_tokens=8
    )
    harness.add("a", [1, 2], 20)
    harness.step(2)
    harness.add("b", [2] * 16, 2)
    harness.step(2)

    # One token of `a` and 8 of the prompt leave one for drafts.
    assert [plan.num_tokens.tolist() for plan in harness.runner.plans[2:]] == [[2, 8], [2, 8]]


def test_rows_with_state_that_cannot_go_back_have_no_drafts() -> None:
    speculation = make_speculation(oracle)
    harness = Harness(speculation=speculation)
    harness.engine.add(request("a", [1, 2], max_tokens=6, allowed_token_ids=tuple(range(1, 50))))
    harness.run()

    assert speculation.num_verified == 0
    assert harness.tokens["a", 0] == expected_output([1, 2], 6)


def test_speculation_is_refused_while_steps_overlap() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        Harness(overlap=True, speculation=make_speculation(oracle))
