"""Drafts change how many tokens a step yields, and nothing else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings

from remora.configs.errors import ConfigError
from remora.engine.types import FinishReason, Request, SamplingParams, StepResult
from tests.engine.fakes import FakeRunner, expected_output, make_window_room
from tests.engine.scheduler.scheduled import Harness
from tests.engine.scheduler.test_scheduler import SchedulerMachine
from tests.engine.spec.proposers import (
    GUESSES,
    FixedController,
    Guess,
    any_of_them,
    constant,
    make_speculation,
    oracle,
)
from tests.thinned import thinned


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
@pytest.mark.parametrize("part", thinned(((part,) for part in range(4)), 4))
def test_tokens_lines_and_ends_are_those_without_drafts(part: int, guess: Guess) -> None:
    rng = random.Random(f"{guess.__name__} {part}")
    for case in range(500):
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
            assert len(tokens) == harness.num_runs[key] + harness.drafts[key].num_accepted
        stats = harness.engine.stats()
        counted = [sum(each) for each in zip(*harness.drafts.values(), strict=True)]
        assert stats.drafts_by_source[1] == ("guess", tuple(counted))
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


def test_drafts_are_counted_for_each_sequence_and_by_source() -> None:
    controller = FixedController(3)
    harness = Harness(speculation=make_speculation(constant, 3, controller=controller))
    predicted = tuple(expected_output([1, 2], 9))
    harness.add("told", [1, 2], 9, n=2, prediction_ids=predicted)
    harness.add("other", [2, 1], 9)
    harness.run()

    # After the first token, two steps of 3 right drafts each; nothing is left to draft then.
    assert harness.drafts["told", 0] == harness.drafts["told", 1] == (2, 6, 6)
    num_rows, num_drafts, num_accepted = harness.drafts["other", 0]
    assert num_drafts > num_accepted
    stats = harness.engine.stats()
    assert dict(stats.drafts_by_source) == {
        "prediction": (4, 12, 12),
        "guess": (num_rows, num_drafts, num_accepted),
    }
    assert controller.num_predicted == 4
    num_verified = sum(len(plan.draft_ids) > 0 for plan in harness.runner.plans)
    assert 0 < stats.verify_steps_total == num_verified < len(harness.runner.plans)


def test_the_time_of_a_step_counts_as_verifying_if_it_has_drafts() -> None:
    controller = FixedController(3)
    speculation = make_speculation(constant, 3, controller=controller)
    for num_drafts, pure in ((0, True), (2, True), (3, False)):
        speculation.observe_step(8, 0.5, num_drafts=num_drafts, draft_s=0.0, pure=pure)

    assert (speculation.num_verify_steps, speculation.verify_s) == (2, 1.0)
    assert controller.num_steps == 2  # a step with a prompt says nothing of verifying


class TimedRunner(FakeRunner):
    """Takes a second to make drafts, as a draft model does."""

    def finish(self) -> StepResult:
        plan, result = self.plans[-1], super().finish()
        return replace(result, draft_s=1.0) if len(plan.draft_ids) else result


def test_steps_in_which_a_row_has_its_first_drafts_do_not_tell_the_time_of_a_draft() -> None:
    # A draft model computes all that the row has got since it last had drafts.
    controller = FixedController(2)
    speculation = make_speculation(oracle, 5, controller=controller)
    harness = Harness(runner=TimedRunner(), speculation=speculation)
    harness.add("a", [1, 2], 60)
    for most in (2, 3, 4, 0, 5, 4):  # the prompt's step, then those with up to so many drafts
        controller.most = most
        harness.step()
    assert controller.drafting == [(4, 1.0), (4, 1.0)]

    harness.add("b", [2, 2], 40)
    predicted = tuple(expected_output([2, 1], 20))
    harness.add("told", [2, 1], 20, prediction_ids=predicted)
    harness.step()
    controller.drafting.clear()
    controller.most = 3
    harness.step(2)  # `b` is new in the first of them; predicted drafts take no time
    assert controller.drafting == [(3, 1.0)]
    assert speculation.draft_s == harness.engine.stats().draft_time_total_s == 7.0


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


def test_rows_with_a_logit_processor_have_no_drafts() -> None:
    speculation = make_speculation(oracle)
    harness = Harness(speculation=speculation, logit_processors={"any": "its:code"})
    harness.engine.add(request("a", [1, 2], max_tokens=6, custom_logit_processor="any"))
    harness.run()

    assert speculation.counts.num_rows == 0
    assert harness.tokens["a", 0] == expected_output([1, 2], 6)


def test_speculation_is_refused_while_steps_overlap() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        Harness(overlap=True, speculation=make_speculation(oracle))
