"""The step rule, under any order of arrivals, aborts and shortages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from remora.configs.planning.window_plan import WindowRoom
from remora.engine.types import FinishReason, Request, SamplingParams
from tests.engine.fakes import expected_output, make_window_room
from tests.engine.scheduler.scheduled import PROMPTS, TWO_SLOTS, Harness, make_request


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps and aborts in any order, in little memory."""

    overlap = False
    windows: WindowRoom | None = None

    def __init__(self) -> None:
        super().__init__()
        self.harness = self.make_harness(
            num_pages=20,
            priority_preemption_gap=1,
            conservativeness=0.1,
            adapters=TWO_SLOTS,
            windows=self.windows,
        )
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    def make_harness(self, **options: Any) -> Harness:
        return Harness(overlap=self.overlap, **options)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 40),
        priority=st.integers(0, 3),
        cache_salt=st.sampled_from(["", "x"]),
        n=st.integers(1, 3),
        prompt_logprobs=st.sampled_from([None, 0]),
        lora_id=st.integers(0, 4),
    )
    def add(self, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        name = f"r{len(self.requests)}"
        request = make_request(name, prompt, max_tokens, **fields)
        self.harness.engine.add(request)
        self.requests[name] = request

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        self.harness.step(count)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(name)
        self.harness.abort(name)
        indexes = range(self.requests[name].sampling.n)
        assert {(name, index) for index in indexes} <= self.harness.ends.keys()

    @rule()
    def flush(self) -> None:
        stats = self.harness.engine.stats()
        idle = stats.num_running + stats.num_waiting == 0
        assert self.harness.engine.flush_cache() == idle

    @invariant()
    def nothing_is_lost(self) -> None:
        self.harness.engine.check_integrity()

    def teardown(self) -> None:
        self.harness.run()
        for name, request in self.requests.items():
            for index in range(request.sampling.n):
                got = self.harness.tokens[name, index]
                count = request.sampling.max_tokens
                assert count is not None
                expected = expected_output(list(request.prompt_ids), count, request.lora_id)
                end = self.harness.ends[name, index]
                assert got == expected[: len(got)]
                if name not in self.aborted:
                    assert (end, len(got)) == (FinishReason.LENGTH, count)
                    wants = request.sampling.prompt_logprobs is not None and index == 0
                    lines = list(request.prompt_ids)[1:] if wants else []
                    assert self.harness.scored[name, index] == lines
        stats = self.harness.engine.stats()
        assert stats.num_held_pages == stats.num_held_window_pages == 0
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


class OverlappingMachine(SchedulerMachine):
    """The same with steps planned before the result of the one before is known."""

    overlap = True


class WindowedMachine(SchedulerMachine):
    """The same with few pages for window layers."""

    windows = make_window_room(num_pages=6)


class OverlappingWindowedMachine(OverlappingMachine):
    """Both."""

    windows = make_window_room(num_pages=9, overlap=True)


TestSchedulerMachine = SchedulerMachine.TestCase
TestOverlappingMachine = OverlappingMachine.TestCase
TestWindowedMachine = WindowedMachine.TestCase
TestOverlappingWindowedMachine = OverlappingWindowedMachine.TestCase
for case in (TestSchedulerMachine, TestOverlappingMachine):
    case.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
for case in (TestWindowedMachine, TestOverlappingWindowedMachine):
    case.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=8),
    chunk=st.integers(1, 9),
    budget=st.integers(4, 20),
    prefix_cache=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_output_does_not_depend_on_chunks_budget_or_cache(
    prompts: list[list[int]], chunk: int, budget: int, prefix_cache: bool
) -> None:
    harness = Harness(prefill_chunk_tokens=chunk, max_step_tokens=budget, prefix_cache=prefix_cache)

    for number, prompt in enumerate(prompts):
        harness.add(f"r{number}", prompt, 6)
    harness.run()

    for number, prompt in enumerate(prompts):
        assert harness.tokens[f"r{number}", 0] == expected_output(prompt, 6)


@pytest.mark.parametrize("overlap", [False, True])
def test_long_requests_that_do_not_fit_together_all_finish_by_preemption(overlap: bool) -> None:
    harness = Harness(overlap=overlap, num_pages=16, max_step_tokens=64, conservativeness=0.1)
    for number in range(8):
        harness.add(f"r{number}", [number + 1] * 6, 50)

    harness.run()

    assert harness.engine.stats().preemptions_total > 0
    for number in range(8):
        assert harness.tokens[f"r{number}", 0] == expected_output([number + 1] * 6, 50)


def test_siblings_share_the_pages_of_their_prompt() -> None:
    harness = Harness(max_step_tokens=64, prefill_chunk_tokens=64)
    harness.add("r", list(range(1, 18)), 4, n=3)
    harness.step(2)

    stats = harness.engine.stats()

    assert stats.num_running == 3
    assert stats.cached_tokens_total == 2 * 16
    assert stats.num_held_pages == 4 + 3


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(PROMPTS, st.integers(1, 4), st.integers(1, 12)), min_size=1),
    num_pages=st.integers(14, 40),
    overlap=st.booleans(),
    windowed=st.booleans(),
    aborted=st.booleans(),
)
def test_siblings_share_without_a_prefix_cache_and_leave_nothing(
    requests: list[tuple[list[int], int, int]],
    num_pages: int,
    overlap: bool,
    windowed: bool,
    aborted: bool,
) -> None:
    options: dict[str, Any] = {"windows": make_window_room(num_pages=40)} if windowed else {}
    harness = Harness(
        prefix_cache=False, num_pages=num_pages, conservativeness=0.1, overlap=overlap, **options
    )
    for at, (prompt, n, max_tokens) in enumerate(requests[:6]):
        harness.add(f"r{at}", prompt, max_tokens, n=n)
        harness.step()
    if aborted:
        harness.abort("r0")
    harness.run()

    for at, (prompt, n, max_tokens) in enumerate(requests[:6]):
        for index in range(n):
            made = harness.tokens[f"r{at}", index]
            wanted = expected_output(prompt, max_tokens)
            assert made == wanted or (aborted and at == 0)
    stats = harness.engine.stats()
    assert stats.num_free_pages == stats.num_pages == num_pages
    assert not harness.engine._kv._radix._roots


def test_without_max_tokens_output_goes_on_to_the_limit() -> None:
    harness = Harness(max_model_len=32)
    sampling = SamplingParams(max_tokens=None, temperature=0.0)
    harness.engine.add(Request(request_id="r", prompt_ids=[1, 2], sampling=sampling))

    harness.run()

    assert len(harness.tokens["r", 0]) == 30
    assert harness.ends["r", 0] is FinishReason.LENGTH


def test_a_scored_prompt_that_is_cached_already_still_fits() -> None:
    harness = Harness(num_pages=8, max_model_len=64, max_step_tokens=64, prefill_chunk_tokens=64)
    prompt = list(range(1, 18))
    harness.add("first", prompt, 2)
    harness.run()
    harness.add("scored", prompt, 15, prompt_logprobs=0)

    harness.run()

    assert harness.scored["scored", 0] == prompt[1:]
    assert harness.engine.stats().preemptions_total == 0


def test_equal_prompts_in_flight_survive_a_shortage() -> None:
    harness = Harness(
        num_pages=12, max_step_tokens=64, prefill_chunk_tokens=64, conservativeness=0.1
    )
    prompt = list(range(1, 18))
    harness.add("short", prompt, 2)
    harness.add("long", prompt, 31)

    harness.run()

    assert harness.tokens["long", 0] == expected_output(prompt, 31)


def test_nobody_is_preempted_in_vain() -> None:
    harness = Harness(max_running_requests=2, priority_preemption_gap=0, num_pages=32)
    harness.add("high", [1] * 60, 40, priority=5)
    harness.add("low", [2] * 8, 20)
    harness.step(12)
    assert harness.engine.stats().num_running == 2
    harness.add("urgent", [3] * 60, 10, priority=4)

    harness.step()

    assert harness.engine.stats().preemptions_total == 0


def test_only_the_first_of_n_scores_the_prompt() -> None:
    harness = Harness(max_step_tokens=64, prefill_chunk_tokens=64)
    harness.add("r", list(range(1, 33)), 1, n=4, prompt_logprobs=0)

    harness.run()

    computed = sum(int(plan.num_tokens.sum()) for plan in harness.runner.plans)
    assert computed == 32 + 3 * 4
    assert [len(harness.scored["r", index]) for index in range(4)] == [31, 0, 0, 0]


def test_siblings_that_cannot_borrow_do_not_wait() -> None:
    harness = Harness(share_prompts=False, max_step_tokens=64)
    harness.add("r", [1] * 8, 2, n=4)

    harness.step()

    assert harness.engine.stats().num_running == 4
