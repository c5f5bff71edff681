"""What holds for any numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.deployments.autoscaling.facts import LOAD_NAMES, Facts, ReplicaLoad, Targets
from remora.deployments.autoscaling.policy import Decision, begin, decide
from tests.deployments.autoscaling.makers import TARGETS, Decider, make_facts, make_load

anything = st.one_of(st.none(), st.floats(), st.integers(-5, 10**9), st.text(max_size=3))
loads = st.dictionaries(st.sampled_from(LOAD_NAMES), anything).map(ReplicaLoad.of)
counts = st.integers(0, 30)
amounts = st.floats(0, 1e9)


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    low, high = sorted((draw(counts), draw(st.integers(1, 30))))
    return make_facts(
        draw(st.lists(loads, max_size=5)),
        target=draw(st.integers(low, max(high, 1))),
        num_ready=draw(counts),
        min_replicas=low,
        max_replicas=max(high, 1),
        total_requests=draw(amounts),
        held_requests=draw(amounts),
    )


@given(st.lists(any_facts(), min_size=1, max_size=6), st.floats(0, 400))
def test_the_number_stays_within_bounds_whatever_is_reported(
    moments: list[Facts], apart_s: float
) -> None:
    memory = begin(moments[0])
    for number, facts in enumerate(moments):
        seen = replace(facts, now=number * apart_s)
        decision, memory = decide(seen, TARGETS, memory)
        assert seen.min_replicas <= decision.replicas <= seen.max_replicas
        assert all(math.isfinite(wish.replicas) and wish.replicas >= 0 for wish in decision.demands)


@given(any_facts(), st.floats(1e-300, 1e-9), st.floats(1e-300, 1e300))
def test_targets_of_any_size_are_reckoned_with(facts: Facts, tiny: float, any_size: float) -> None:
    targets = Targets(requests=tiny, kv_usage=any_size, ttft_s=any_size, itl_s=tiny)
    decision, _ = decide(facts, targets, begin(facts))
    assert facts.min_replicas <= decision.replicas <= facts.max_replicas


loaded = st.fixed_dictionaries(
    {
        "num_running": st.floats(0, 100),
        "num_waiting": st.floats(0, 100),
        "queued_tokens": st.floats(0, 1e5),
        "kv_usage": st.floats(0, 0.5),
        "ttft_p90_s": st.floats(0, 20),
        "itl_p90_s": st.floats(0, 1),
    }
)


def wanted(values: dict[str, float], num_replicas: int, growth: float = 1.0) -> Decision:
    load = make_load(**{name: value * growth for name, value in values.items()})
    facts = make_facts([load] * num_replicas, max_replicas=1000)
    return decide(facts, TARGETS, begin(facts))[0]


@given(loaded, st.integers(1, 8), st.floats(1, 2))
def test_more_load_never_asks_for_fewer_replicas(
    values: dict[str, float], num_replicas: int, growth: float
) -> None:
    before, after = wanted(values, num_replicas), wanted(values, num_replicas, growth)
    assert after.wanted >= before.wanted
    assert after.enough >= before.enough


@settings(max_examples=25)
@given(st.floats(0.1, 60), st.floats(0, 0.5), st.integers(1, 10))
def test_a_constant_load_settles(running: float, kv_usage: float, first: int) -> None:
    """Requests and memory are shared by whoever is there; nothing else changes."""
    quick = replace(TARGETS, upscale_delay_s=1.0, downscale_delay_s=3.0)
    decider = Decider(first, quick)
    seen: list[int] = []
    for _ in range(300):
        load = make_load(num_running=running / decider.ready, kv_usage=kv_usage / decider.ready)
        decider.decide(load)
        decider.start_all()
        seen.append(decider.target)
    # As many as the load needs, or those that a margin is kept for; and no more changes.
    needed = max(running / TARGETS.requests, kv_usage / TARGETS.kv_usage, 0.01)
    assert len(set(seen[200:])) == 1
    assert math.ceil(needed - 1e-6) <= seen[-1] <= math.ceil(needed / 0.7 + 1e-6)


@pytest.mark.parametrize("target", [None, 0.5])
@given(facts=any_facts())
def test_targets_that_are_not_set_ask_for_nothing(target: float | None, facts: Facts) -> None:
    options: dict[str, Any] = {"ttft_s": target, "itl_s": target}
    decision, _ = decide(facts, Targets(requests=1.0, **options), begin(facts))

    asked = {wish.signal: wish.replicas for wish in decision.demands}

    if target is None:
        assert asked["ttft_p90_s"] == asked["itl_p90_s"] == 0
