"""When the policy follows its signals, and how far."""

from __future__ import annotations

import pytest

from remora.deployments.autoscaling.facts import ReplicaLoad
from remora.deployments.autoscaling.policy import MAX_PATIENCE
from tests.deployments.autoscaling.makers import IDLE, Decider, make_load

BUSY = make_load(num_running=16.0)  # asks for 1.6 replicas for each


def running(requests: float) -> ReplicaLoad:
    return make_load(num_running=requests)


@pytest.mark.parametrize(
    ("start", "min_replicas", "looks", "targets"),
    [
        pytest.param(1, 1, [(BUSY, 5), (BUSY, 1)], [1, 2], id="growth after its delay"),
        pytest.param(1, 1, [(BUSY, 4), (running(9.0), 1)] * 10, [1] * 20, id="short peaks"),
        pytest.param(
            10,
            1,
            [(running(18.0), 3), (running(12.0), 1), (running(18.0), 2)],
            [10, 10, 12],
            id="growth to the least that was wanted during the delay",
        ),
        pytest.param(4, 1, [(running(100.0), 6)], [8], id="growth is at most twofold"),
        pytest.param(
            10, 1, [(running(1.0), 60), (running(1.0), 1)], [10, 5], id="half go after the delay"
        ),
        pytest.param(
            10,
            1,
            [(running(1.0), 30), (running(5.5), 1), (running(1.0), 30)],
            [10, 10, 8],
            id="the most that was needed during the delay stays",
        ),
        pytest.param(
            1, 0, [(IDLE, 99), (running(1.0), 1), (IDLE, 99), (IDLE, 2)], [1, 1, 1, 0], id="to zero"
        ),
        pytest.param(3, 0, [(IDLE, 101)], [0], id="several idle replicas go together"),
        pytest.param(  # a request that came and went between two of Serve's samples
            1,
            0,
            [(make_load(idle_s=99.0), 1), (make_load(idle_s=1.0), 50)] * 10,
            [1] * 20,
            id="a request that only the replica saw",
        ),
    ],
)
def test_the_target_follows_the_load(
    start: int, min_replicas: int, looks: list[tuple[ReplicaLoad, int]], targets: list[int]
) -> None:
    """looks: load of each replica, and for how many seconds"""
    decider = Decider(start, min_replicas=min_replicas)

    assert [decider.decide(load, seconds).replicas for load, seconds in looks] == targets


def test_replicas_that_start_are_not_asked_for_again() -> None:
    decider = Decider(1)
    decider.decide(BUSY, seconds=6)

    decision = decider.decide(BUSY, seconds=60)

    assert decision.replicas == 2
    assert decision.pending is None


def test_load_that_would_fill_the_rest_to_the_brim_keeps_all_of_them() -> None:
    decider = Decider(2)

    decision = decider.decide(make_load(num_running=4.5), seconds=500)

    assert decision.replicas == 2
    assert decision.reason == "fewer would leave no margin"


def test_readers_of_metrics_keep_no_replica_alive() -> None:
    decider = Decider(1, min_replicas=0)

    decider.decide(IDLE, seconds=102, total_requests=0.1)

    assert decider.target == 0


def test_the_first_request_brings_the_first_replica_at_once() -> None:
    decider = Decider(0, min_replicas=0)

    assert decider.decide(IDLE).replicas == 0
    assert decider.decide(IDLE, total_requests=1.0, held_requests=1.0).replicas == 1


def test_what_is_starting_is_kept_although_nothing_is_known_of_it() -> None:
    decider = Decider(3)
    decider.ready = 0

    decision = decider.decide(IDLE, seconds=1000)

    assert decision.replicas == 3
    assert decision.reason == "none is ready yet"


def test_who_took_away_too_soon_is_more_patient_the_next_time() -> None:
    decider = Decider(2)
    waits = []
    for _ in range(8):
        lowered_at = decider.now
        while decider.target == 2:
            decider.decide(running(1.0))
        waits.append(decider.now - lowered_at)
        decider.start_all()
        decider.decide(BUSY, seconds=10)
        decider.start_all()

    assert waits[1] == pytest.approx(2 * waits[0], rel=0.05)
    assert waits[-1] == pytest.approx(MAX_PATIENCE * waits[0], rel=0.05)


def test_patience_is_forgotten_when_fewer_were_enough_for_long() -> None:
    decider = Decider(2)
    decider.decide(running(1.0), seconds=61)
    decider.start_all()
    decider.decide(make_load(num_running=8.0), seconds=1000)

    decision = decider.decide(BUSY, seconds=6)

    assert (decision.replicas, decision.patience) == (2, 1)


def test_a_number_set_by_others_begins_all_delays_anew() -> None:
    decider = Decider(4)
    decider.decide(running(1.0), seconds=59)

    decider.target = decider.ready = 6
    decider.decide(running(1.0), seconds=59)

    assert decider.target == 6


def test_the_time_that_replicas_take_to_start_is_learnt() -> None:
    decider = Decider(1)
    decider.decide(BUSY, seconds=6)
    decider.decide(BUSY, seconds=90)
    decider.start_all()

    decision = decider.decide(make_load(num_running=6.0))

    assert decision.startup_s == pytest.approx((30 + 91) / 2)


def test_a_pending_change_says_what_it_waits_for() -> None:
    decider = Decider(1)

    pending = decider.decide(BUSY, seconds=3).pending

    assert pending is not None
    assert (pending.replicas, pending.since_s, pending.delay_s) == (2, 2.0, 5.0)
