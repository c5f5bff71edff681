"""Who may come, who starts first, and what is said to be waiting."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from remora.configs.errors import InvalidRequest, PromptTooLong
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.engine.scheduler import scheduler
from remora.engine.scheduler.admission import can_start
from remora.engine.scheduler.scheduler import MAX_SKIPPED
from remora.engine.scheduler.sequence import Sequence
from tests.engine.fakes import VOCAB
from tests.engine.scheduler.scheduled import Harness, make_request


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"max_model_len": 40}, r"needs 50 tokens .* 10 more .* context of 40"),
        ({"num_pages": 5}, r"needs 50 tokens .* 30 more .* holds 20"),
    ],
)
def test_a_request_too_long_for_context_or_memory_says_by_how_much(
    limit: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PromptTooLong, match=reason):
        Harness(**limit).engine.add(make_request("r", [1] * 20, 30))


@pytest.mark.parametrize(
    ("name", "prompt", "param"),
    [
        ("s", [], "prompt"),
        ("r", [1], "rid"),
        *(("s", prompt, "prompt") for prompt in ([1, -1], [1, VOCAB], [2**62])),
    ],
)
def test_empty_prompts_foreign_tokens_and_repeated_ids_are_refused(
    name: str, prompt: list[int], param: str
) -> None:
    harness = Harness()
    harness.add("r", [1])

    with pytest.raises(InvalidRequest) as caught:
        harness.add(name, prompt)

    assert caught.value.param == param


def test_a_prompt_under_way_counts_whole_in_the_estimate() -> None:
    harness = Harness(max_step_tokens=16, prefill_chunk_tokens=8)
    for name in ("a", "b"):
        harness.add(name, [ord(name) % 40] * 80, 1)

    harness.run()

    assert harness.engine.stats().preemptions_total == 0


def test_what_fits_together_starts_together() -> None:
    harness = Harness(max_step_tokens=128, prefill_chunk_tokens=128)
    harness.add("a", [1] * 70, 2)
    harness.add("b", [2] * 8, 2)

    harness.step()

    assert harness.engine.stats().num_running == 2


def test_queued_tokens_are_what_is_left_to_compute_before_all_decode() -> None:
    harness = Harness(max_running_requests=1, max_step_tokens=8, prefill_chunk_tokens=8)
    harness.add("a", list(range(1, 21)), 3)
    harness.add("b", [5] * 6, 1)
    assert harness.engine.stats().num_queued_tokens == 26

    harness.step()
    assert harness.engine.stats().num_queued_tokens == 12 + 6
    harness.step(2)
    assert harness.engine.stats().num_queued_tokens == 6  # a decodes

    harness.run()
    assert harness.engine.stats().num_queued_tokens == 0


def test_what_is_cached_is_not_queued() -> None:
    harness = Harness(max_running_requests=1)
    harness.add("first", [2] * 10, 1)
    harness.run()
    harness.add("blocks", [9], 20)
    harness.step()

    harness.add("again", [2] * 10, 1)
    harness.add("other tenant", [2] * 10, 1, cache_salt="x")

    assert harness.engine.stats().num_queued_tokens == 2 + 10


def test_siblings_queue_their_prompt_once() -> None:
    harness = Harness()

    harness.add("r", [2] * 8, 1, n=3)

    assert harness.engine.stats().num_queued_tokens == 8 + 1 + 1


def test_what_a_preempted_sequence_must_compute_again_is_queued() -> None:
    harness = Harness(max_running_requests=1, priority_preemption_gap=0, prefix_cache=False)
    harness.add("low", [2] * 8, 20)
    harness.step(4)
    produced = len(harness.tokens["low", 0])
    harness.add("urgent", [3] * 4, 20, priority=1)

    harness.step()

    stats = harness.engine.stats()
    assert (stats.preemptions_total, stats.num_queued_tokens) == (1, 8 + produced)


def test_a_rare_adapter_is_overtaken_only_so_often() -> None:
    one_slot = LoRASlotConfig(num_slots=1, max_rank=1, targets=())
    harness = Harness(adapters=one_slot, num_pages=64, max_queued_requests=200)
    numbers = itertools.count()

    def add_popular() -> None:  # of different lengths: one of them runs at any time
        number = next(numbers)
        harness.add(f"{number}", [1] * 3, 3 + number % 5, lora_id=1)

    for _ in range(8):
        add_popular()
    harness.step()
    harness.add("rare", [2] * 3, 4, lora_id=2)
    while ("rare", 0) not in harness.ends:
        add_popular()
        harness.step()

    started = [init.token_ids[0] for plan in harness.runner.plans for init in plan.added]
    first = 8  # they came before it
    rows = harness.plan.max_running_requests
    assert MAX_SKIPPED <= started.index(2) <= first + MAX_SKIPPED + rows


def test_a_sequence_without_memory_is_not_estimated_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    estimates: list[Sequence] = []

    def counting(candidate: Sequence, *others: Any) -> bool:
        estimates.append(candidate)
        return can_start(candidate, *others)

    monkeypatch.setattr(scheduler, "can_start", counting)
    harness = Harness(num_pages=12)
    harness.add("a", [1] * 4, 40)
    harness.step()
    harness.add("b", [2] * 4, 40)

    harness.step(33)

    assert harness.engine.stats().num_waiting == 1
    assert len(estimates) == 3


def test_a_sequence_without_memory_starts_as_soon_as_another_ends() -> None:
    harness = Harness(num_pages=12)
    harness.add("a", [1] * 4, 40)
    harness.step(5)
    harness.add("b", [2] * 4, 40)
    harness.step(3)

    harness.abort("a")
    harness.step()

    assert harness.engine.stats().num_waiting == 0
