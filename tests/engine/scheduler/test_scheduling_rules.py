"""The step rule under every order, pace and reserve: the same outputs, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from remora.configs.planning.scheduling_plan import ReservePlan, SchedulingPlan
from tests.engine.scheduler.scheduled import TWO_SLOTS, Harness
from tests.engine.scheduler.test_scheduler import SchedulerMachine

POLICIES = st.sampled_from(["fcfs", "lpm", "dfs-weight", "lof", "random"])
RESERVES = st.builds(
    ReservePlan,
    full_usage=st.sampled_from([None, 0.0, 0.5]),
    expected_output_tokens=st.sampled_from([None, 2, 30]),
    min_tokens=st.sampled_from([0, 10]),
    free_fraction=st.sampled_from([0.0, 0.5]),
)
RULES = st.builds(
    SchedulingPlan,
    policy=POLICIES,
    use_priorities=st.booleans(),
    mixed_steps=st.booleans(),
    chunked_prefill=st.booleans(),
    max_prefill_requests=st.sampled_from([None, 1, 2]),
    max_prefill_tokens=st.sampled_from([None, 1, 5]),
    admission_interval_steps=st.sampled_from([1, 3]),
    reserve=RESERVES,
)


class RulesMachine(SchedulerMachine):
    """Arrivals, steps and aborts in any order, under rules that are drawn."""

    @initialize(
        rules=RULES,
        eviction=st.sampled_from(["lru", "lfu"]),
        overlap=st.booleans(),
        keeps=st.booleans(),
    )
    def begin(self, rules: SchedulingPlan, eviction: str, overlap: bool, keeps: bool) -> None:
        sizes: dict[str, Any] = {}
        if not rules.chunked_prefill:
            sizes = dict.fromkeys(("max_step_tokens", "max_model_len", "prefill_chunk_tokens"), 80)
        self.harness = Harness(
            overlap=overlap,
            num_pages=20,
            priority_preemption_gap=1,
            conservativeness=0.1,
            adapters=TWO_SLOTS,
            scheduling=rules,
            prefix_eviction=eviction,
            **sizes,
        )
        engine: Any = self.harness.engine
        add = engine.add
        if keeps:
            engine.add = lambda request: add(
                replace(request, kept_tokens=len(request.prompt_ids) // 2)
            )


TestRulesMachine = RulesMachine.TestCase
TestRulesMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
