"""What the policies are for, over the real scheduler and cache on a virtual clock.

The same simulation with more calls is measured by tests/benchmarks/routing_balance.py and
prefix_routing.py.
"""

from __future__ import annotations

import pytest

from tests.deployments.routing.loads import adapter_load, conversations, skewed_load
from tests.deployments.routing.simulation import Simulation


def run_conversations(policy: str, num_replicas: int, **how: float) -> Simulation:
    simulation = Simulation(policy, num_replicas=num_replicas)
    simulation.run(conversations(16, 5, seed=3, **how))  # type: ignore[arg-type]
    return simulation


def test_counting_tokens_shortens_the_wait_behind_long_prompts() -> None:
    def p99_s(policy: str) -> float:
        simulation = Simulation(policy, num_replicas=3)
        simulation.run(skewed_load(400, 12.0, seed=1))
        return simulation.first_token_s(0.99)

    assert p99_s("shortest_queue") < 0.8 * p99_s("round_robin")


@pytest.mark.parametrize("policy", ["prefix", "session"])
def test_several_replicas_find_as_much_in_their_caches_as_one(policy: str) -> None:
    alone = run_conversations(policy, 1).hit_rate

    together = run_conversations(policy, 3)

    assert together.hit_rate > alone - 0.05
    assert run_conversations("power_of_two", 3).hit_rate < alone - 0.1


def test_a_prefix_that_all_share_does_not_end_up_on_one_replica() -> None:
    busy = run_conversations("prefix", 3, shared_tokens=600, pause_s=0.2)

    assert busy.imbalance < 1.5
    assert all(replica.engine.stats().finished_total for replica in busy.replicas.values())


def run_adapters(policy: str, *, rate: float = 6.0, hot_share: float = 0.0) -> Simulation:
    simulation = Simulation(policy, num_replicas=3, num_routers=2)
    simulation.run(adapter_load(500, rate, seed=2, hot_share=hot_share))
    return simulation


def test_adapters_are_loaded_less_often_where_requests_go_to_them() -> None:
    by_adapter, by_load = run_adapters("lora"), run_adapters("shortest_queue")

    assert by_adapter.num_loads < 0.5 * by_load.num_loads
    assert by_adapter.first_token_s(0.5) < by_load.first_token_s(0.5)


def test_an_adapter_that_all_ask_for_does_not_end_up_on_one_replica() -> None:
    busy = run_adapters("lora", rate=15.0, hot_share=1.0)

    assert busy.imbalance < 1.5
    assert busy.num_loads == 3
