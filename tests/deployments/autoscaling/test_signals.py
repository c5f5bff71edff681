"""What each signal asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from remora.deployments.autoscaling.facts import Facts, ReplicaLoad
from remora.deployments.autoscaling.signals import Demand, demands
from tests.deployments.autoscaling.makers import IDLE, TARGETS, make_facts, make_load


def make_wish(signal: str, facts: Facts, **options: Any) -> Demand:
    given = {"share": 1.0, "startup_s": 30.0, "is_settled": True, **options}
    found = demands(facts, TARGETS, **given)
    return next(wish for wish in found if wish.signal == signal)


LATE = make_load(num_running=5.0, queued_tokens=900.0, ttft_p90_s=7.0)
BACKLOG = make_load(queued_tokens=60_000.0)


def running(requests: float, **values: float | None) -> ReplicaLoad:
    return make_load(num_running=requests, **values)


@pytest.mark.parametrize(
    ("signal", "facts", "replicas"),
    [
        pytest.param("requests", make_facts([running(30.0), running(10.0)]), 4, id="shared evenly"),
        pytest.param(
            "requests",
            make_facts([running(20.0)], num_ready=3, target=3),
            6,
            id="a replica without reports counts as one like the others",
        ),
        pytest.param(
            "requests", make_facts([running(10.0)], held_requests=20.0), 3, id="held requests"
        ),
        pytest.param(
            "requests",
            make_facts([running(8.0, num_waiting=22.0, tokens_per_s=None, finished_per_s=None)]),
            3,
            id="waiting requests count while the speed is unknown",
        ),
        pytest.param("kv_usage", make_facts([make_load(kv_usage=0.9)] * 2), 2.25, id="1.8 / 0.8"),
        pytest.param("backlog", make_facts([BACKLOG]), 3, id="cleared while a replica starts"),
        pytest.param("backlog", make_facts([BACKLOG, IDLE]), 0, id="another replica is free"),
        pytest.param("ttft_p90_s", make_facts([LATE] * 4), 6, id="late: half as many more"),
        # 20 ms alone, 180 ms now, 100 ms wanted: twice the replicas.
        pytest.param("itl_p90_s", make_facts([running(8.0, itl_p90_s=0.18)] * 3), 6, id="tokens"),
        pytest.param(
            "itl_p90_s",
            make_facts([running(8.0, itl_p90_s=0.14), IDLE]),
            1.5,
            id="an idle replica takes tokens of others",
        ),
    ],
)
def test_what_a_signal_asks_for(signal: str, facts: Facts, replicas: float) -> None:
    assert make_wish(signal, facts).replicas == pytest.approx(replicas)


def test_without_any_report_all_open_requests_count() -> None:
    facts = make_facts([], num_ready=2, target=2, total_requests=55.0)

    wish = make_wish("requests", facts)

    assert wish.replicas == pytest.approx(5.5)
    assert "no reports" in wish.note


def test_a_backlog_is_the_time_until_it_is_computed() -> None:
    for load, seconds in (
        (make_load(queued_tokens=500.0), 0.5),
        (make_load(queued_tokens=40.0, num_waiting=20.0), 10),  # short prompts, long answers
    ):
        assert make_wish("backlog", make_facts([load])).value == pytest.approx(seconds)
    assert make_wish("backlog", make_facts([BACKLOG]), startup_s=60.0).replicas == 2


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
    wish = make_wish("ttft_p90_s", make_facts([replace(LATE, **changes)]), **options)

    assert wish.replicas == replicas
    assert note in wish.note


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
