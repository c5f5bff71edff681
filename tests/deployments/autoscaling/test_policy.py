"""When the policy follows its signals, and how far."""

from __future__ import annotations

import pytest

from remora.deployments.autoscaling.policy import MAX_PATIENCE
from tests.deployments.autoscaling.makers import IDLE, Decider, make_load

BUSY = make_load(num_running=16.0)  # asks for 1.6 replicas for each


def test_more_replicas_come_after_the_delay_and_not_before() -> None:
    decider = Decider(1)

    assert decider.decide(BUSY, seconds=5).replicas == 1
    assert decider.decide(BUSY).replicas == 2


def test_a_peak_shorter_than_the_delay_changes_nothing() -> None:
    decider = Decider(1)

    for _ in range(10):
        decider.decide(BUSY, seconds=4)
        decider.decide(make_load(num_running=9.0))

    assert decider.target == 1


def test_the_least_that_was_wanted_through_the_delay_is_what_comes() -> None:
    decider = Decider(10)

    decider.decide(make_load(num_running=18.0), seconds=3)
    decider.decide(make_load(num_running=12.0), seconds=1)
    decider.decide(make_load(num_running=18.0), seconds=2)

    assert decider.target == 12


def test_replicas_that_start_are_not_asked_for_again() -> None:
    decider = Decider(1)
    decider.decide(BUSY, seconds=6)

    decision = decider.decide(BUSY, seconds=60)

    assert decision.replicas == 2
    assert decision.pending is None


def test_growth_is_at_most_twofold_at_once() -> None:
    decider = Decider(4)

    decision = decider.decide(make_load(num_running=100.0), seconds=6)

    assert decision.replicas == 8


def test_fewer_are_left_after_the_delay_and_half_of_them_at_most() -> None:
    decider = Decider(10)

    assert decider.decide(make_load(num_running=1.0), seconds=60).replicas == 10
    assert decider.decide(make_load(num_running=1.0)).replicas == 5


def test_the_most_that_was_needed_through_the_delay_is_what_is_left() -> None:
    decider = Decider(10)

    decider.decide(make_load(num_running=1.0), seconds=30)
    decider.decide(make_load(num_running=5.5), seconds=1)
    decider.decide(make_load(num_running=1.0), seconds=30)

    assert decider.target == 8


def test_load_that_would_fill_the_rest_to_the_brim_keeps_all_of_them() -> None:
    decider = Decider(2)

    decision = decider.decide(make_load(num_running=4.5), seconds=500)

    assert decision.replicas == 2
    assert decision.reason == "fewer would leave no margin"


def test_a_request_in_the_middle_puts_the_last_replica_off_being_taken_away() -> None:
    decider = Decider(1, min_replicas=0)

    decider.decide(IDLE, seconds=99)
    decider.decide(make_load(num_running=1.0))
    decider.decide(IDLE, seconds=99)
    assert decider.target == 1
    decider.decide(IDLE, seconds=2)

    assert decider.target == 0


def test_several_idle_replicas_all_go_when_nobody_has_asked_for_long_enough() -> None:
    decider = Decider(3, min_replicas=0)

    decider.decide(IDLE, seconds=101)

    assert decider.target == 0


def test_a_request_seen_by_a_replica_alone_counts_as_one() -> None:
    # It came and went between two of Serve's samples.
    decider = Decider(1, min_replicas=0)

    for _ in range(10):
        decider.decide(make_load(idle_s=99.0), seconds=1)
        decider.decide(make_load(idle_s=1.0), seconds=50)

    assert decider.target == 1


def test_who_reads_metrics_keeps_no_replica_alive() -> None:
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
            decider.decide(make_load(num_running=1.0))
        waits.append(decider.now - lowered_at)
        decider.start_all()
        decider.decide(make_load(num_running=16.0), seconds=10)
        decider.start_all()

    assert waits[1] == pytest.approx(2 * waits[0], rel=0.05)
    assert waits[-1] == pytest.approx(MAX_PATIENCE * waits[0], rel=0.05)


def test_patience_is_forgotten_when_fewer_were_enough_for_long() -> None:
    decider = Decider(2)
    decider.decide(make_load(num_running=1.0), seconds=61)
    decider.start_all()
    decider.decide(make_load(num_running=8.0), seconds=1000)

    decision = decider.decide(make_load(num_running=16.0), seconds=6)

    assert (decision.replicas, decision.patience) == (2, 1)


def test_a_number_set_by_others_begins_all_delays_anew() -> None:
    decider = Decider(4)
    decider.decide(make_load(num_running=1.0), seconds=59)

    decider.target = decider.ready = 6
    decider.decide(make_load(num_running=1.0), seconds=59)

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
