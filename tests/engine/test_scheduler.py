"""The step rule, under any order of arrivals, aborts and shortages.

The engine runs over a fake model whose next token depends on every token it reads back through the
page table, so shared, stale or swapped pages show as wrong output.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from remora.configs.errors import InvalidRequest, PromptTooLong
from remora.configs.plan import AdapterRoom, EnginePlan
from remora.engine.engine import Engine
from remora.engine.scheduler import MAX_OVERTAKEN
from remora.engine.types import FinishReason, Request, SamplingParams, SequenceOutput
from tests.engine.fakes import VOCAB, FakeDevice, FakeRunner, expected_output, make_plan

TWO_SLOTS = AdapterRoom(num_slots=2, max_rank=1, targets=())
PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=30)


def make_request(
    name: str,
    prompt: list[int],
    max_tokens: int = 5,
    *,
    priority: int = 0,
    salt: str = "",
    n: int = 1,
    prompt_logprobs: int | None = None,
    adapter: int = 0,
) -> Request:
    """A greedy request."""
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, n=n, prompt_logprobs=prompt_logprobs
    )
    return Request(
        request_id=name,
        prompt_ids=prompt,
        sampling=sampling,
        priority=priority,
        cache_salt=salt,
        adapter=adapter,
    )


class Harness:
    """An engine, and what came out of it per sequence."""

    def __init__(
        self, *, overlap: bool = False, made: EnginePlan | None = None, **plan: object
    ) -> None:
        self.plan = made or make_plan(**plan)
        device = FakeDevice(self.plan.page_size)
        self.runner = device if overlap else FakeRunner(self.plan.page_size)
        self.engine = Engine(
            self.plan,
            self.runner,
            eos_token_ids=[0],
            vocab_size=VOCAB,
            overlapping=device if overlap else None,
        )
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ends: dict[tuple[str, int], FinishReason] = {}
        self.scored: dict[tuple[str, int], list[int]] = defaultdict(list)

    def take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.ends, "output after the end"
            self.tokens[key] += output.token_ids
            self.scored[key] += [t for p in output.prompt_logprobs for t in p.token_ids.tolist()]
            if output.finish_reason is not None:
                self.ends[key] = output.finish_reason

    def step(self) -> None:
        self.take(self.engine.step())
        self.engine.check_integrity()

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine makes no progress")


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps and aborts in any order, in little memory."""

    overlap = False

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(
            overlap=self.overlap,
            num_pages=20,
            priority_preemption_gap=1,
            conservativeness=0.1,
            adapters=TWO_SLOTS,
        )
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 40),
        priority=st.integers(0, 3),
        salt=st.sampled_from(["", "x"]),
        n=st.integers(1, 3),
        scored=st.booleans(),
        adapter=st.integers(0, 4),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        salt: str,
        n: int,
        scored: bool,
        adapter: int,
    ) -> None:
        name = f"r{len(self.requests)}"
        request = make_request(
            name,
            prompt,
            max_tokens,
            priority=priority,
            salt=salt,
            n=n,
            prompt_logprobs=0 if scored else None,
            adapter=adapter,
        )
        self.harness.engine.add(request)
        self.requests[name] = request

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(name)
        self.harness.take(self.harness.engine.abort(name))

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
                expected = expected_output(list(request.prompt_ids), count, request.adapter)
                end = self.harness.ends[name, index]
                assert got == expected[: len(got)]
                if name not in self.aborted:
                    assert (end, len(got)) == (FinishReason.LENGTH, count)
                    wants = request.sampling.prompt_logprobs is not None and index == 0
                    lines = list(request.prompt_ids)[1:] if wants else []
                    assert self.harness.scored[name, index] == lines
        stats = self.harness.engine.stats()
        assert stats.num_held_pages == 0
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


class OverlappingMachine(SchedulerMachine):
    """The same while each step is planned before the one before is known."""

    overlap = True


TestOverlappingMachine = OverlappingMachine.TestCase
TestOverlappingMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


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
        harness.engine.add(make_request(f"r{number}", prompt, 6))
    harness.run()

    for number, prompt in enumerate(prompts):
        assert harness.tokens[f"r{number}", 0] == expected_output(prompt, 6)


def test_a_step_never_exceeds_its_budget_or_chunk() -> None:
    harness = Harness(max_step_tokens=12, prefill_chunk_tokens=5)
    for number in range(6):
        harness.engine.add(make_request(f"r{number}", [number + 1] * 23, 8))

    harness.run()

    assert max(int(plan.num_tokens.sum()) for plan in harness.runner.plans) <= 12
    assert max(int(plan.num_tokens.max()) for plan in harness.runner.plans) <= 5


def test_prefill_and_decode_share_a_step() -> None:
    harness = Harness()
    harness.engine.add(make_request("short", [1, 2], 20))
    harness.step()
    harness.engine.add(make_request("long", [3] * 20, 2))

    harness.step()

    assert harness.runner.plans[-1].num_tokens.tolist() == [1, 8]


def test_long_requests_that_do_not_fit_together_all_finish_by_preemption() -> None:
    harness = Harness(num_pages=16, max_step_tokens=64, conservativeness=0.1)
    for number in range(8):
        harness.engine.add(make_request(f"r{number}", [number + 1] * 6, 50))

    harness.run()

    assert harness.engine.stats().preemptions_total > 0
    for number in range(8):
        assert harness.tokens[f"r{number}", 0] == expected_output([number + 1] * 6, 50)


def test_siblings_share_the_pages_of_their_prompt() -> None:
    harness = Harness(max_step_tokens=64, prefill_chunk_tokens=64)
    harness.engine.add(make_request("r", list(range(1, 18)), 4, n=3))
    harness.step()
    harness.step()

    stats = harness.engine.stats()

    assert stats.num_running == 3
    assert stats.cached_tokens_total == 2 * 16
    assert stats.num_held_pages == 4 + 3


def test_a_repeated_prompt_is_found_in_the_cache() -> None:
    harness = Harness()
    harness.engine.add(make_request("first", list(range(1, 14)), 3))
    harness.run()
    harness.engine.add(make_request("again", list(range(1, 14)), 3))

    harness.run()

    assert harness.engine.stats().cached_tokens_total == 12
    assert harness.tokens["again", 0] == harness.tokens["first", 0]


def test_urgent_requests_start_first_and_equals_in_order_of_arrival() -> None:
    harness = Harness(max_running_requests=1, max_step_tokens=16)
    for name, priority in (("a", 0), ("b", 0), ("c", 5)):
        harness.engine.add(make_request(name, [1, 2, 3], 2, priority=priority))

    harness.run()

    assert [name for name, _ in harness.ends] == ["c", "a", "b"]


def test_low_priority_first_turns_the_order_round() -> None:
    harness = Harness(max_running_requests=1, low_priority_first=True)
    for name, priority in (("a", 3), ("b", 1)):
        harness.engine.add(make_request(name, [1, 2, 3], 2, priority=priority))

    harness.run()

    assert [name for name, _ in harness.ends] == ["b", "a"]


def test_an_urgent_request_preempts_only_beyond_the_gap() -> None:
    harness = Harness(max_running_requests=1, priority_preemption_gap=2)
    harness.engine.add(make_request("low", [1, 2, 3], 12))
    harness.step()
    harness.engine.add(make_request("close", [4, 5], 2, priority=2))
    harness.step()
    assert harness.engine.stats().preemptions_total == 0
    harness.engine.add(make_request("urgent", [6, 7], 2, priority=3))

    harness.run()

    assert [name for name, _ in harness.ends] == ["urgent", "close", "low"]
    assert harness.tokens["low", 0] == expected_output([1, 2, 3], 12)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_gives_the_pages_back_in_every_state(steps: int) -> None:
    harness = Harness()
    harness.engine.add(make_request("r", [1] * 20, 30, n=2))
    for _ in range(steps):
        harness.step()

    harness.take(harness.engine.abort("r"))

    assert set(harness.ends.values()) == {FinishReason.ABORT}
    assert harness.engine.stats().num_held_pages == 0
    assert not harness.engine.has_work


def test_a_request_too_long_for_the_context_says_by_how_much() -> None:
    harness = Harness(max_model_len=40)

    with pytest.raises(PromptTooLong, match=r"needs 50 tokens .* 10 more .* context of 40"):
        harness.engine.add(make_request("r", [1] * 20, 30))


def test_a_request_too_long_for_the_memory_says_by_how_much() -> None:
    harness = Harness(num_pages=5)

    with pytest.raises(PromptTooLong, match=r"needs 50 tokens .* 30 more .* holds 20"):
        harness.engine.add(make_request("r", [1] * 20, 30))


def test_empty_prompts_and_repeated_ids_are_refused() -> None:
    harness = Harness()
    harness.engine.add(make_request("r", [1]))

    with pytest.raises(InvalidRequest, match="empty"):
        harness.engine.add(make_request("s", []))
    with pytest.raises(InvalidRequest, match="in use"):
        harness.engine.add(make_request("r", [1]))


@pytest.mark.parametrize("prompt", [[1, -1], [1, VOCAB], [2**62]])
def test_token_ids_that_the_model_lacks_are_refused(prompt: list[int]) -> None:
    harness = Harness()

    with pytest.raises(InvalidRequest, match="0 to 49"):
        harness.engine.add(make_request("r", prompt))


def test_without_max_tokens_output_goes_on_to_the_limit() -> None:
    harness = Harness(max_model_len=32)
    sampling = SamplingParams(max_tokens=None, temperature=0.0)
    harness.engine.add(Request(request_id="r", prompt_ids=[1, 2], sampling=sampling))

    harness.run()

    assert len(harness.tokens["r", 0]) == 30
    assert harness.ends["r", 0] is FinishReason.LENGTH


def test_a_row_without_finite_logits_ends_alone() -> None:
    harness = Harness()
    harness.engine.add(make_request("bad", [1, 2, 3], 4))
    harness.engine.add(make_request("good", [4, 5, 6], 4))
    harness.runner.bad_rows = {0}

    harness.run()

    assert harness.ends["bad", 0] is FinishReason.ABORT
    assert harness.tokens["good", 0] == expected_output([4, 5, 6], 4)


def test_a_scored_prompt_that_is_cached_already_still_fits() -> None:
    harness = Harness(num_pages=8, max_model_len=64, max_step_tokens=64, prefill_chunk_tokens=64)
    prompt = list(range(1, 18))
    harness.engine.add(make_request("first", prompt, 2))
    harness.run()
    harness.engine.add(make_request("scored", prompt, 15, prompt_logprobs=0))

    harness.run()

    assert harness.scored["scored", 0] == prompt[1:]
    assert harness.engine.stats().preemptions_total == 0


def test_equal_prompts_in_flight_survive_a_shortage() -> None:
    harness = Harness(
        num_pages=12, max_step_tokens=64, prefill_chunk_tokens=64, conservativeness=0.1
    )
    prompt = list(range(1, 18))
    harness.engine.add(make_request("short", prompt, 2))
    harness.engine.add(make_request("long", prompt, 31))

    harness.run()

    assert harness.tokens["long", 0] == expected_output(prompt, 31)


def test_a_prompt_under_way_counts_whole_in_the_estimate() -> None:
    harness = Harness(max_step_tokens=16, prefill_chunk_tokens=8)
    for name in ("a", "b"):
        harness.engine.add(make_request(name, [ord(name) % 40] * 80, 1))

    harness.run()

    assert harness.engine.stats().preemptions_total == 0


def test_what_fits_together_starts_together() -> None:
    harness = Harness(max_step_tokens=128, prefill_chunk_tokens=128)
    harness.engine.add(make_request("a", [1] * 70, 2))
    harness.engine.add(make_request("b", [2] * 8, 2))

    harness.step()

    assert harness.engine.stats().num_running == 2


def test_nobody_is_preempted_in_vain() -> None:
    harness = Harness(max_running_requests=2, priority_preemption_gap=0, num_pages=32)
    harness.engine.add(make_request("high", [1] * 60, 40, priority=5))
    harness.engine.add(make_request("low", [2] * 8, 20))
    for _ in range(12):
        harness.step()
    assert harness.engine.stats().num_running == 2
    harness.engine.add(make_request("urgent", [3] * 60, 10, priority=4))

    harness.step()

    assert harness.engine.stats().preemptions_total == 0


def test_only_the_first_of_n_scores_the_prompt() -> None:
    harness = Harness(max_step_tokens=64, prefill_chunk_tokens=64)
    harness.engine.add(make_request("r", list(range(1, 33)), 1, n=4, prompt_logprobs=0))

    harness.run()

    computed = sum(int(plan.num_tokens.sum()) for plan in harness.runner.plans)
    assert computed == 32 + 3 * 4
    assert [len(harness.scored["r", index]) for index in range(4)] == [31, 0, 0, 0]


def test_siblings_that_cannot_borrow_do_not_wait() -> None:
    harness = Harness(prefix_cache=False, max_step_tokens=64)
    harness.engine.add(make_request("r", [1] * 8, 2, n=4))

    harness.step()

    assert harness.engine.stats().num_running == 4


def test_queued_tokens_are_what_is_left_to_compute_before_all_decode() -> None:
    harness = Harness(max_running_requests=1, max_step_tokens=8, prefill_chunk_tokens=8)
    harness.engine.add(make_request("a", list(range(1, 21)), 3))
    harness.engine.add(make_request("b", [5] * 6, 1))
    assert harness.engine.stats().num_queued_tokens == 26

    harness.step()
    assert harness.engine.stats().num_queued_tokens == 12 + 6
    harness.step()
    harness.step()
    assert harness.engine.stats().num_queued_tokens == 6  # a decodes

    harness.run()
    assert harness.engine.stats().num_queued_tokens == 0


def test_what_is_cached_is_not_queued() -> None:
    harness = Harness(max_running_requests=1)
    harness.engine.add(make_request("first", [2] * 10, 1))
    harness.run()
    harness.engine.add(make_request("blocks", [9], 20))
    harness.step()

    harness.engine.add(make_request("again", [2] * 10, 1))
    harness.engine.add(make_request("other tenant", [2] * 10, 1, salt="x"))

    assert harness.engine.stats().num_queued_tokens == 2 + 10


def test_siblings_queue_their_prompt_once() -> None:
    harness = Harness()

    harness.engine.add(make_request("r", [2] * 8, 1, n=3))

    assert harness.engine.stats().num_queued_tokens == 8 + 1 + 1


def test_what_a_preempted_sequence_must_compute_again_is_queued() -> None:
    harness = Harness(max_running_requests=1, priority_preemption_gap=0, prefix_cache=False)
    harness.engine.add(make_request("low", [2] * 8, 20))
    for _ in range(4):
        harness.step()
    produced = len(harness.tokens["low", 0])
    harness.engine.add(make_request("urgent", [3] * 4, 20, priority=1))

    harness.step()

    stats = harness.engine.stats()
    assert (stats.preemptions_total, stats.num_queued_tokens) == (1, 8 + produced)


def test_a_rare_adapter_is_overtaken_only_so_often() -> None:
    one_slot = AdapterRoom(num_slots=1, max_rank=1, targets=())
    harness = Harness(adapters=one_slot, num_pages=64, max_queued_requests=200)
    numbers = itertools.count()

    def add_popular() -> None:  # of different lengths: one of them runs at any time
        number = next(numbers)
        harness.engine.add(make_request(f"{number}", [1] * 3, 3 + number % 5, adapter=1))

    for _ in range(8):
        add_popular()
    harness.step()
    harness.engine.add(make_request("rare", [2] * 3, 4, adapter=2))
    while ("rare", 0) not in harness.ends:
        add_popular()
        harness.step()

    started = [init.token_ids[0] for plan in harness.runner.plans for init in plan.added]
    first = 8  # they came before it
    rows = harness.plan.max_running_requests
    assert MAX_OVERTAKEN <= started.index(2) <= first + MAX_OVERTAKEN + rows
