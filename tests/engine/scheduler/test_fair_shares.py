"""Tenants share the engine by weight, and none is passed over for long."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from remora.engine.scheduler.fair_shares import MAX_SCORED_TOKENS
from remora.engine.tenants import Tenant
from tests.engine.scheduler.scheduled import PROMPTS, Harness, make_request
from tests.engine.scheduler.test_scheduler import SchedulerMachine

HEAVY, LIGHT = Tenant(name="heavy"), Tenant(name="light")
TENANTS = (HEAVY, LIGHT, Tenant(name="capped", weight=3.0, kv_fraction=0.3), Tenant())


class TenantsMachine(SchedulerMachine):
    """Requests of several tenants, one of them unnamed: outputs and pages as without tenants."""

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 40),
        tenant=st.sampled_from(TENANTS),
        priority=st.integers(0, 3),
        prompt_logprobs=st.sampled_from([None, 0]),
        lora_id=st.integers(0, 4),
    )
    def add_of_tenant(self, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        name = f"r{len(self.requests)}"
        request = make_request(name, prompt, max_tokens, **fields)
        self.harness.engine.add(request)
        self.requests[name] = request


class OverlappingTenantsMachine(TenantsMachine):
    """The same with steps planned before the result of the one before is known."""

    overlap = True


TestTenantsMachine = TenantsMachine.TestCase
TestOverlappingTenantsMachine = OverlappingTenantsMachine.TestCase
TestTenantsMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestOverlappingTenantsMachine.settings = TestTenantsMachine.settings


def unlike(number: int, length: int) -> list[int]:
    """Return a prompt whose beginning no other number has."""
    return [1 + (number >> bit & 1) for bit in range(12)] + [1] * (length - 12)


class Backlog:
    """Tenants with more requests than can ever run, and what was served to each."""

    def __init__(self, **plan: Any) -> None:
        usual = {"num_pages": 200, "max_running_requests": 8, "prefix_cache": False}
        self.harness = Harness(**(usual | plan))
        self._num_added = 0

    def fill(self, tenant: Tenant, num: int, length: int, max_tokens: int) -> None:
        for _ in range(num):
            self._num_added += 1
            prompt = unlike(self._num_added, length)
            self.harness.add(f"{tenant.name}{self._num_added}", prompt, max_tokens, tenant=tenant)

    def served(self) -> dict[str, int]:
        return {t.name: t.served_tokens_total for t in self.harness.engine.stats().tenants}


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    shapes=st.lists(st.tuples(st.integers(12, 60), st.integers(1, 30)), min_size=4, max_size=4),
)
@settings(max_examples=20, deadline=None)
def test_shares_follow_weights_and_none_is_passed_over_for_more_than_some_steps(
    weights: list[float], shapes: list[tuple[int, int]]
) -> None:
    tenants = tuple(Tenant(name=f"t{i}", weight=w) for i, w in enumerate(weights))
    backlog = Backlog()
    for tenant, (length, max_tokens) in zip(tenants, shapes, strict=False):
        backlog.fill(tenant, 260, length, max_tokens)
    for _ in range(200):
        backlog.harness.take(backlog.harness.engine.step())
        served = [backlog.served()[t.name] / t.weight for t in tenants]
        assert max(served) - min(served) <= 4 * backlog.harness.plan.max_step_tokens / min(weights)
    backlog.harness.engine.check_integrity()
    assert all(t.num_waiting for t in backlog.harness.engine.stats().tenants)


@pytest.mark.parametrize("num_heavy", [1, 100])
def test_a_light_request_starts_in_the_next_step(num_heavy: int) -> None:
    backlog = Backlog()
    backlog.fill(HEAVY, num_heavy, 100, 20)
    for _ in range(40):
        backlog.harness.step()
        backlog.fill(LIGHT, 1, 12, 1)
        backlog.harness.step(2)
        (light,) = (t for t in backlog.harness.engine.stats().tenants if t.name == "light")
        assert light.num_waiting == light.num_running == 0


def test_a_scored_prompt_is_computed_in_small_parts_next_to_other_tenants() -> None:
    backlog = Backlog(max_step_tokens=200, prefill_chunk_tokens=200, max_model_len=400)
    backlog.fill(HEAVY, 1, 300, 1)
    backlog.harness.add("scored", [2] * 300, 1, prompt_logprobs=0, tenant=LIGHT)
    backlog.harness.run()
    scored = [init.row for plan in backlog.harness.runner.plans for init in plan.added]
    counts = [
        int(plan.num_tokens[list(plan.rows).index(scored[1])])
        for plan in backlog.harness.runner.plans
        if scored[1] in plan.rows
    ]
    assert max(counts) == MAX_SCORED_TOKENS
    assert backlog.harness.scored["scored", 0] == [2] * 299


def test_idle_time_saves_nothing_up() -> None:
    backlog = Backlog()
    backlog.fill(HEAVY, 100, 40, 10)
    backlog.harness.step(60)
    before = backlog.served()["heavy"]
    backlog.fill(LIGHT, 100, 40, 10)
    backlog.harness.step(60)
    heavy, light = backlog.served()["heavy"] - before, backlog.served()["light"]
    assert abs(heavy - light) <= 4 * backlog.harness.plan.max_step_tokens


def test_a_tenant_keeps_to_its_fraction_of_the_cache() -> None:
    capped = Tenant(name="capped", kv_fraction=0.25)
    backlog = Backlog(max_running_requests=16, num_pages=100)
    backlog.fill(HEAVY, 4, 40, 8)
    for number in range(20):
        backlog.harness.add(f"c{number}", unlike(number, 40), 4, tenant=capped)
    most: Counter[str] = Counter()
    while backlog.harness.engine.has_work:
        backlog.harness.step()
        for tenant in backlog.harness.engine.stats().tenants:
            most[tenant.name] = max(most[tenant.name], tenant.num_held_pages)
    assert 12 <= most["capped"] <= 25


def test_priorities_order_a_tenants_own_requests_only() -> None:
    harness = Harness(max_running_requests=2, priority_preemption_gap=0, num_pages=100)
    harness.add("light", unlike(1, 20), 60, tenant=LIGHT)
    harness.add("low", unlike(2, 20), 30, tenant=HEAVY)
    harness.step(3)
    for number, (name, priority) in enumerate({"high": 9, "higher": 10, "middle": 5}.items()):
        harness.add(name, unlike(3 + number, 20), 30, tenant=HEAVY, priority=priority)
    while harness.engine.has_work:
        harness.step()
    ended = [name for name, _ in harness.ends]
    assert [name for name in ended if name != "light"] == ["higher", "high", "middle", "low"]
    # Every step had a row for the light tenant, which no priority of another took.
    assert ended.index("light") < 3
    served = {t.name: t.served_tokens_total for t in harness.engine.stats().tenants}
    assert served["light"] == 20 + 60 - 1


@pytest.mark.parametrize("arrives", ["first", "last"])
def test_in_a_shortage_of_memory_the_tenant_with_most_pages_gives_way(arrives: str) -> None:
    backlog = Backlog(num_pages=40, max_running_requests=4, conservativeness=0.1)
    if arrives == "first":
        backlog.fill(LIGHT, 1, 16, 30)
    backlog.fill(HEAVY, 3, 16, 60)
    backlog.harness.step(8)
    if arrives == "last":
        backlog.fill(LIGHT, 1, 16, 30)
    backlog.harness.run()
    assert backlog.harness.engine.stats().preemptions_total > 0
    # Nothing was computed twice: the last token of an output is not computed.
    assert backlog.served()["light"] == 16 + 30 - 1
    assert backlog.served()["heavy"] > 3 * (16 + 60 - 1)
