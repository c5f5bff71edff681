"""Beam searches in an engine with other requests: results, pages, rows and ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.configs.errors import InvalidRequest, InvalidSampling, PromptTooLong, RequestError
from remora.engine.beams.params import BeamParams
from remora.engine.scheduler.plan_builder import PlanBuilder
from remora.engine.types import NOT_FINITE, FinishReason, Request, RowFault, SamplingParams
from tests.engine.beams.fake_beams import BeamRunner, beam_request, next_scores
from tests.engine.beams.plain_search import plain_search
from tests.engine.fakes import make_plan, make_window_room
from tests.engine.scheduler.scheduled import Harness

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
STOP = 0


def make_harness(**options: Any) -> Harness:
    options = {"max_running_requests": 10, "num_pages": 64} | options
    return Harness(runner=BeamRunner(4), **options)


def expected(request: Request) -> list[tuple[list[int], float]]:
    sampling, lora_id = request.sampling, request.lora_id
    assert sampling.beams is not None
    assert sampling.max_tokens is not None
    return plain_search(
        lambda context: next_scores(context, lora_id),
        request.prompt_ids,
        sampling.beams,
        stop_ids={STOP},
        max_tokens=sampling.max_tokens,
    )[: sampling.n]


def check(harness: Harness, *requests: Request) -> None:
    for request in requests:
        for index, (output, _) in enumerate(expected(request)):
            assert harness.tokens[request.request_id, index] == output
            is_stop = output[-1] == STOP
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
            assert harness.ends[request.request_id, index] is reason
            assert harness.stops[request.request_id, index] == (STOP if is_stop else None)
    stats = harness.engine.stats()
    assert stats.num_held_pages == stats.num_running == 0
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
    assert len(harness.engine._scheduler._free_rows) == harness.plan.max_running_requests


SEARCHES = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(1, 3), min_size=1, max_size=20),
        "max_tokens": st.integers(1, 12),
        "n": st.integers(1, 2),
        "width": st.sampled_from([2, 4, 6, 8]),
        "length_penalty": st.sampled_from([1.0, 0.0, -1.0, 2.0]),
        "early_stopping": st.sampled_from([True, False, "never"]),
        "num_groups": st.sampled_from([1, 2]),
        "diversity_penalty": st.sampled_from([0.7, 3.0]),
    }
)


def request_of(name: str, prompt: list[int], **fields: Any) -> Request:
    if fields["num_groups"] == 1:
        del fields["diversity_penalty"]
    return beam_request(name, prompt, **fields)


@settings(max_examples=60, deadline=None)
@given(
    searches=st.lists(SEARCHES, min_size=1, max_size=3),
    others=st.lists(
        st.tuples(st.lists(st.integers(1, 3), min_size=1), st.integers(1, 30)), max_size=4
    ),
    overlap=st.booleans(),
    prefix_cache=st.booleans(),
    aborted=st.integers(-1, 2),
)
def test_searches_are_as_if_alone_and_leave_nothing(
    searches: list[dict[str, Any]],
    others: list[tuple[list[int], int]],
    overlap: bool,
    prefix_cache: bool,
    aborted: int,
) -> None:
    harness = make_harness(overlap=overlap, prefix_cache=prefix_cache)
    requests = [request_of(f"beams{at}", **fields) for at, fields in enumerate(searches)]
    for at, (prompt, count) in enumerate(others):
        harness.add(f"other{at}", prompt[:40], count)
    for request in requests:
        harness.engine.add(request)
        harness.step(2)
    if aborted >= 0:
        harness.abort(f"beams{aborted}")
        requests = [request for request in requests if request.request_id != f"beams{aborted}"]
    harness.run()

    check(harness, *requests)


def test_beams_share_the_pages_of_their_common_beginning() -> None:
    harness = make_harness()
    request = beam_request("a", PROMPT * 3, width=8, n=8, max_tokens=12)
    harness.engine.add(request)
    harness.run()

    check(harness, request)
    full = len(PROMPT * 3) // 4
    assert isinstance(harness.runner, BeamRunner)
    assert harness.runner.num_shared >= 7 * full


def test_a_search_that_has_begun_is_not_preempted_and_others_are() -> None:
    harness = make_harness(num_pages=47, conservativeness=0.01)
    request = beam_request("a", PROMPT, width=4, n=4, max_tokens=30)
    harness.engine.add(request)
    harness.step()
    harness.add("b", [1, 2], 40)
    harness.add("c", [2, 1], 40)
    harness.run()

    check(harness, request)
    assert harness.engine.stats().preemptions_total > 0
    assert len(harness.tokens["b", 0]) == len(harness.tokens["c", 0]) == 40


def test_a_prompt_of_a_search_can_be_preempted() -> None:
    harness = make_harness(num_pages=40, max_step_tokens=4, prefill_chunk_tokens=4)
    request = beam_request("low", PROMPT * 3, width=4, n=2, max_tokens=4)
    harness.engine.add(request)
    harness.step(2)
    root = harness.engine._open["low"][0]
    assert root.row is not None
    harness.engine._scheduler.preempt(root, PlanBuilder(4))
    harness.engine.check_integrity()
    harness.run()

    check(harness, request)


@pytest.mark.parametrize(
    ("fault", "message"),
    [(NOT_FINITE, "not finite"), (RowFault("its grammar failed", of_request=True), "its grammar")],
)
def test_a_failure_ends_the_request_and_frees_all(fault: RowFault, message: str) -> None:
    harness = make_harness()
    assert isinstance(harness.runner, BeamRunner)
    harness.runner.fault = fault
    harness.engine.add(beam_request("a", PROMPT, width=4, n=2))
    harness.step()
    harness.runner.bad_rows = set(range(10))
    harness.run()

    assert message in harness.errors["a", 0]
    check(harness)


def test_an_aborted_search_ends_each_of_its_outputs() -> None:
    harness = make_harness()
    harness.engine.add(beam_request("a", PROMPT, width=4, n=3))
    harness.step(4)
    harness.abort("a")
    harness.run()

    assert {key: end.value for key, end in harness.ends.items()} == {
        ("a", index): "abort" for index in range(3)
    }
    check(harness)


@pytest.mark.parametrize(
    ("error", "plan", "fields"),
    [
        (InvalidSampling, {"max_running_requests": 4}, {"width": 5}),
        (PromptTooLong, {"num_pages": 8}, {"width": 4, "max_tokens": 16}),
        (
            InvalidRequest,
            {"windows": make_window_room(num_pages=40)},
            {"width": 2},
        ),
    ],
)
def test_searches_that_can_never_run_are_refused(
    error: type[RequestError], plan: dict[str, Any], fields: dict[str, Any]
) -> None:
    harness = Harness(made=make_plan(**plan), runner=BeamRunner(4))
    with pytest.raises(error):
        harness.engine.add(beam_request("a", PROMPT, **fields))


def test_outputs_without_a_limit_fill_the_memory_and_no_more() -> None:
    harness = make_harness(num_pages=20)
    sampling = SamplingParams(max_tokens=None, n=4, beams=BeamParams(width=4), ignore_eos=True)
    harness.engine.add(Request(request_id="a", prompt_ids=PROMPT, sampling=sampling))
    harness.run()

    # 2 full pages of the prompt, 1 that is copied, and 4 of each beam: KV of 24 tokens.
    assert {len(tokens) for tokens in harness.tokens.values()} == {24 + 1 - len(PROMPT)}


@pytest.mark.parametrize(
    "fields",
    [
        {"width": 0},
        {"width": 33},
        {"width": 4, "num_groups": 3},
        {"width": 4, "diversity_penalty": 1.0},
        {"width": 4, "length_penalty": 11.0},
        {"width": 4, "early_stopping": "soon"},
    ],
    ids=str,
)
def test_impossible_parameters_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidSampling):
        BeamParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 5},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.5},
        {"hidden_states": True},
        {"custom_logit_processor": "mine"},
    ],
    ids=str,
)
def test_what_beams_do_not_work_with_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidSampling) as raised:
        SamplingParams(beams=BeamParams(width=4), **fields)
    assert raised.value.param in fields
