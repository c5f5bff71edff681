"""What the keys of memory and of the prefix cache do to an engine."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.errors import ConfigError
from tests.engine.configured import PAGE_BYTES, configured, plan_for
from tests.engine.fakes import expected_output
from tests.engine.scheduler.scheduled import Harness

UNSIZED = ("kv_tokens",)


def ask(harness: Harness, token: int, *, num_tokens: int = 8, name: str = "r") -> int:
    """Run a request of equal tokens; return how many of them were cached."""
    before = harness.engine.stats().cached_tokens_total
    harness.add(f"{name} {len(harness.ends)}", [token] * (num_tokens + 1), 1)
    harness.run()
    return harness.engine.stats().cached_tokens_total - before


@pytest.mark.observes("engine.page_size")
def test_prefixes_are_shared_in_whole_pages() -> None:
    for page_size, cached in ((1, 10), (4, 8), (8, 8), (16, 0)):
        harness = configured(page_size=page_size)
        ask(harness, 1, num_tokens=10)
        assert ask(harness, 1, num_tokens=10) == cached


@pytest.mark.observes("engine.prefix_cache")
@pytest.mark.parametrize(("on", "cached"), [(True, 8), (False, 0)])
def test_prefixes_are_kept_or_not(on: bool, cached: int) -> None:
    harness = configured(prefix_cache=on)
    ask(harness, 1)

    assert ask(harness, 1) == cached
    assert (harness.engine.stats().num_cached_pages > 0) == on


@pytest.mark.observes("engine.share_prompts", "lightllm:--diverse_mode")
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("shares", "cached"), [(True, 3 * 20), (False, 0)])
def test_outputs_of_one_prompt_share_its_pages_or_not(
    shares: bool, cached: int, prefix_cache: bool
) -> None:
    harness = configured(share_prompts=shares, prefix_cache=prefix_cache, max_step_tokens=128)
    harness.add("r", list(range(1, 22)), 5, n=4)
    harness.step(4)
    most_held = harness.engine.stats().num_held_pages
    harness.run()

    computed = sum(int(plan.num_tokens.sum()) for plan in harness.runner.plans)
    stats = harness.engine.stats()
    if shares:
        assert computed == 21 + 3 + 4 * 4  # a prompt, its last token for the others, outputs
        assert most_held == 5 + 4
    else:
        assert computed > 2 * 21
    assert stats.cached_tokens_total >= cached
    assert (stats.num_cached_pages > 0) == prefix_cache
    outputs = {tuple(harness.tokens["r", index]) for index in range(4)}
    assert outputs == {tuple(expected_output(list(range(1, 22)), 5))}


@pytest.mark.observes("engine.prefix_eviction")
@pytest.mark.parametrize(("policy", "kept"), [("lru", 0), ("lfu", 8)])
def test_what_is_found_often_stays_although_it_was_not_lately(policy: str, kept: int) -> None:
    harness = configured(prefix_eviction=policy, kv_tokens=32)
    for _ in range(3):
        ask(harness, 1)  # often
    for token in range(2, 7):
        ask(harness, token)  # once each: more than fit

    assert ask(harness, 1) == kept


@pytest.mark.observes("engine.kv_tokens", "engine.kv_memory")
def test_the_cache_holds_so_many_tokens_or_bytes() -> None:
    plan = plan_for(without=UNSIZED, kv_memory=20 * PAGE_BYTES)

    assert plan_for(kv_tokens=50).num_pages == 12
    assert (plan.num_pages, plan.kv_bytes) == (19, 20 * PAGE_BYTES)  # one is the dump page


@pytest.mark.observes("engine.mem_fraction")
def test_the_cache_takes_a_share_of_what_weights_leave() -> None:
    few, many = (
        plan_for(without=UNSIZED, mem_fraction=share, max_position=2**30) for share in (0.1, 0.5)
    )

    assert many.kv_bytes == pytest.approx(5 * few.kv_bytes, rel=0.01)


def test_by_default_a_cpu_holds_usual_sequences_within_a_quarter_of_free_memory() -> None:
    def default(**keys: Any) -> int:
        return plan_for(without=UNSIZED, max_step_tokens=2**14, **keys).kv_tokens

    usual = default(max_running_requests=8, max_position=2**17)
    quarter = default(max_running_requests=2**14, max_position=2**17)

    assert default(max_running_requests=64, max_position=4096) == 64 * 2048
    assert default(max_running_requests=8, max_position=1024) == 8 * 1024
    assert usual == 2**17  # one sequence of full length
    assert quarter * PAGE_BYTES / 4 == pytest.approx(2**30 / 4, rel=0.01)


def test_on_a_cpu_too_a_share_of_all_memory_and_what_is_left_to_others_count() -> None:
    big = 2**30
    whole = plan_for(without=UNSIZED, total_mem_fraction=0.25, max_position=big)
    rest = plan_for(without=UNSIZED, mem_fraction=0.5, memory_reserve="512MiB", max_position=big)

    assert whole.kv_bytes + whole.weight_bytes == pytest.approx(2**31 * 0.25, rel=0.01)
    assert rest.kv_bytes == pytest.approx(0.5 * (2**30 - 2**29), rel=0.01)


def test_a_reserve_of_all_there_is_leaves_nothing() -> None:
    with pytest.raises(ConfigError, match=r"engine\.memory_reserve below 1 GiB"):
        plan_for(memory_reserve="1GiB")
    with pytest.raises(ConfigError, match=r"engine\.total_mem_fraction = 1e-07 of the memory"):
        plan_for(without=UNSIZED, total_mem_fraction=1e-7)
