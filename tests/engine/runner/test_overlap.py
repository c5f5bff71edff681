"""Steps that are planned before the one before is known: what must hold all the same.

The device of these tests does everything at the last moment, in the order in which it was told. Its
model reads every token back through the page table, so a page or row that changed hands too early
shows as a wrong token.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.engine.types import FinishReason, Request
from tests.engine.fakes import VOCAB, expected_output
from tests.engine.scheduler.scheduled import PROMPTS, Harness, make_request


def stopping_at(request: Request, *token_ids: int) -> Request:
    sampling = dataclasses.replace(request.sampling, stop_token_ids=token_ids)
    return dataclasses.replace(request, sampling=sampling)


def steps_of(harness: Harness, row: int = 0) -> list[tuple[int, int]]:
    """Return (start, number of tokens) of each step that a row took part in."""
    return [
        (int(start), int(count))
        for plan in harness.runner.plans
        for taking, start, count in zip(plan.rows, plan.starts, plan.num_tokens, strict=True)
        if taking == row
    ]


def test_a_row_that_stops_runs_one_wasted_step_whose_token_is_dropped() -> None:
    harness = Harness(overlap=True)
    prompt = [1, 2, 1]
    output = expected_output(prompt, 4)
    assert output[3] not in output[:3]
    harness.engine.add(stopping_at(make_request("a", prompt, 20), output[3]))

    harness.run()

    assert harness.tokens["a", 0] == output
    assert harness.ends["a", 0] is FinishReason.STOP
    assert steps_of(harness) == [(0, 3), (3, 1), (4, 1), (5, 1), (6, 1)]
    assert harness.runner.num_ended == 1


def test_a_row_whose_length_is_known_runs_no_wasted_step() -> None:
    harness = Harness(overlap=True)
    harness.add("a", [1, 2, 1], 4)

    harness.run()

    assert harness.tokens["a", 0] == expected_output([1, 2, 1], 4)
    assert steps_of(harness) == [(0, 3), (3, 1), (4, 1), (5, 1)]


def test_a_step_is_begun_before_the_one_before_is_known() -> None:
    harness = Harness(overlap=True)
    harness.add("a", [1, 2], 3)

    outputs = [harness.engine.step() for _ in range(4)]

    assert [len(given) for given in outputs] == [0, 1, 1, 1]
    assert len(harness.runner.plans) == 3
    assert not harness.engine.has_work


def test_the_last_step_is_drained_although_nobody_runs() -> None:
    harness = Harness(overlap=True)
    prompt = [1, 2]
    harness.engine.add(stopping_at(make_request("a", prompt), expected_output(prompt, 1)[0]))

    harness.step(2)

    assert harness.ends["a", 0] is FinishReason.STOP
    assert harness.engine.has_work
    assert harness.engine.flush_cache()
    assert harness.engine.step() == []
    assert not harness.engine.has_work


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_an_aborted_row_is_given_to_another_and_its_result_is_dropped(steps: int) -> None:
    harness = Harness(overlap=True, max_running_requests=1)
    harness.add("a", [1] * 5, 30)
    harness.step(steps)
    harness.abort("a")
    harness.add("b", [2] * 5, 6)
    num_tokens = len(harness.tokens["a", 0])

    harness.run()

    assert len(harness.tokens["a", 0]) == num_tokens == max(0, steps - 1)
    assert harness.tokens["b", 0] == expected_output([2] * 5, 6)


@settings(max_examples=60)
@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=8),
    stops=st.sets(st.integers(1, VOCAB - 1), max_size=20),
    max_tokens=st.integers(1, 12),
    num_pages=st.integers(12, 40),
)
def test_outputs_are_those_of_steps_one_after_the_other(
    prompts: list[list[int]], stops: set[int], max_tokens: int, num_pages: int
) -> None:
    def run(*, overlap: bool) -> Harness:
        harness = Harness(overlap=overlap, num_pages=num_pages, conservativeness=0.1)
        for number, prompt in enumerate(prompts):
            request = make_request(f"r{number}", prompt, max_tokens, n=1 + number % 2)
            harness.engine.add(stopping_at(request, *stops))
        harness.run()
        return harness

    one_by_one, overlapping = run(overlap=False), run(overlap=True)

    assert overlapping.tokens == one_by_one.tokens
    assert overlapping.ends == one_by_one.ends
    for plan in overlapping.runner.plans:  # lengths are planned with what is coming
        longest = max(len(prompt) for prompt in prompts) + max_tokens - 1
        assert int((plan.starts + plan.num_tokens).max()) <= longest
    assert overlapping.engine.stats().num_held_pages == 0
