"""What each signal asks for."""

from __future__ import annotations

from typing import Any

import pytest

from remora.deployments.autoscaling.facts import Facts, ReplicaLoad
from remora.deployments.autoscaling.signals import Demand, demands
from tests.deployments.autoscaling.makers import IDLE, TARGETS, make_facts, make_load


def make_wish(signal: str, facts: Facts, **options: Any) -> Demand:
    given = {"share": 1.0, "startup_s": 30.0, "is_settled": True, **options}
    found = demands(facts, TARGETS, **given)
    return next(wish for wish in found if wish.signal == signal)


def test_running_requests_are_shared_evenly() -> None:
    facts = make_facts([make_load(num_running=30.0), make_load(num_running=10.0)])
    assert make_wish("requests", facts).replicas == pytest.approx(4)


def test_a_replica_that_does_not_report_is_taken_for_one_like_the_others() -> None:
    facts = make_facts([make_load(num_running=20.0)], num_ready=3, target=3)
    assert make_wish("requests", facts).replicas == pytest.approx(6)


def test_without_any_report_all_open_requests_count() -> None:
    facts = make_facts([], num_ready=2, target=2, total_requests=55.0)

    wish = make_wish("requests", facts)

    assert wish.replicas == pytest.approx(5.5)
    assert "no reports" in wish.note


def test_requests_held_before_the_replicas_count() -> None:
    facts = make_facts([make_load(num_running=10.0)], held_requests=20.0)
    assert make_wish("requests", facts).replicas == pytest.approx(3)


def test_waiting_requests_count_while_nobody_knows_how_fast_they_go() -> None:
    unknown = make_load(num_running=8.0, num_waiting=22.0, tokens_per_s=None, finished_per_s=None)
    assert make_wish("requests", make_facts([unknown])).replicas == pytest.approx(3)


def test_state_in_use_is_shared_evenly() -> None:
    facts = make_facts([make_load(kv_usage=0.9), make_load(kv_usage=0.9)])
    assert make_wish("kv_usage", facts).replicas == pytest.approx(1.8 / 0.8)


def test_a_backlog_is_the_time_until_it_is_computed() -> None:
    facts = make_facts([make_load(queued_tokens=500.0)])
    assert make_wish("backlog", facts).value == pytest.approx(0.5)


def test_short_prompts_wait_for_long_answers() -> None:
    facts = make_facts([make_load(queued_tokens=40.0, num_waiting=20.0)])
    assert make_wish("backlog", facts).value == pytest.approx(10)


def test_a_backlog_asks_for_what_clears_it_while_a_replica_starts() -> None:
    facts = make_facts([make_load(queued_tokens=60_000.0)])
    assert make_wish("backlog", facts, startup_s=30.0).replicas == pytest.approx(3)
    assert make_wish("backlog", facts, startup_s=60.0).replicas == pytest.approx(2)


def test_a_backlog_at_one_replica_is_none_while_others_are_free() -> None:
    facts = make_facts([make_load(queued_tokens=60_000.0), IDLE])
    assert make_wish("backlog", facts).replicas == 0


def test_a_late_first_token_asks_for_half_as_many_more() -> None:
    late = make_load(num_running=5.0, queued_tokens=900.0, ttft_p90_s=7.0)
    assert make_wish("ttft_p90_s", make_facts([late] * 4)).replicas == pytest.approx(6)


@pytest.mark.parametrize(
    ("changes", "options", "replicas", "note"),
    [
        ({}, {"is_settled": False}, 1.0, "measured before"),
        ({"queued_tokens": 0.0}, {}, 1.0, "the next one will not"),
        ({"num_running": 1.0}, {}, 0.0, "would not help"),
    ],
)
def test_a_late_first_token_asks_for_no_more_where_that_helps_nobody(
    changes: dict[str, float], options: dict[str, Any], replicas: float, note: str
) -> None:
    late = make_load(**{"num_running": 5.0, "queued_tokens": 900.0, "ttft_p90_s": 7.0, **changes})

    wish = make_wish("ttft_p90_s", make_facts([late]), **options)

    assert wish.replicas == replicas
    assert note in wish.note


def test_what_load_adds_to_a_tokens_time_is_shared() -> None:
    # 20 ms alone, 180 ms now, 100 ms wanted: twice the room there is.
    facts = make_facts([make_load(num_running=8.0, itl_p90_s=0.18)] * 3)
    assert make_wish("itl_p90_s", facts).replicas == pytest.approx(6)


def test_a_replica_without_tokens_has_room_for_those_of_others() -> None:
    facts = make_facts([make_load(num_running=8.0, itl_p90_s=0.14), IDLE])
    assert make_wish("itl_p90_s", facts).replicas == pytest.approx(1.5)


def test_a_target_below_what_a_token_takes_alone_is_said_to_be_out_of_reach() -> None:
    facts = make_facts([make_load(num_running=8.0, itl_p90_s=0.5, base_itl_s=0.2)])

    wish = make_wish("itl_p90_s", facts)

    assert wish.replicas == 0
    assert "no number of replicas helps" in wish.note


def test_what_is_not_a_number_is_not_known() -> None:
    load = ReplicaLoad.of(
        {
            "num_running": float("nan"),
            "kv_usage": -1.0,
            "ttft_p90_s": float("inf"),
            "itl_p90_s": "soon",
            "num_waiting": 3,
        }
    )
    assert load == ReplicaLoad(num_waiting=3.0)
