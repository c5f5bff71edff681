"""How the policy does under load curves: the bounds that docs/autoscaling.md states."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from itertools import pairwise

import pytest

from remora.deployments.autoscaling import explain
from tests.deployments.autoscaling.simulation import (
    START_S,
    TARGETS,
    Curve,
    Run,
    Simulation,
    capacity,
    slo_policy,
)

ONE = 1.88  # requests per second that a replica takes, as `capacity` measures


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(explain, "publish", lambda *_: None)
    monkeypatch.setattr(explain, "retract", lambda *_: None)
    log = logging.getLogger("ray.serve")
    level = log.level
    log.setLevel(logging.WARNING)
    yield
    log.setLevel(level)


def run(curve: Curve, seconds: float, **options: int) -> Run:
    return Simulation(slo_policy(), **options).run(curve, seconds)


def test_the_simulated_replica_takes_what_the_curves_assume() -> None:
    assert capacity() == pytest.approx(ONE, abs=0.05)


def test_after_a_step_targets_are_met_again_within_two_minutes() -> None:
    found = run(lambda t: (0.7 if t < 200 else 4.5) * ONE, 800)

    assert found.late(since=200 + 120) <= 0.02
    assert found.num_turns <= 2
    assert max(number for _, number in found.targets) <= 2 * 5
    assert found.under <= 0.06


def ramp(t: float) -> float:
    return ONE * (0.5 + 5 * min(t / 900, 1))


def day(t: float) -> float:
    return ONE * (3 + 2.7 * math.sin(2 * math.pi * t / 1800))


@pytest.mark.parametrize(
    ("curve", "seconds", "num_turns", "late", "over"),
    [
        pytest.param(lambda t: ONE * (0.5 + 5 * min(t / 900, 1)), 1200, 0, 0.02, 0.25, id="ramp"),
        pytest.param(
            lambda t: ONE * (3 + 2.7 * math.sin(2 * math.pi * t / 1800)),
            1800,
            4,
            0.1,
            0.3,
            id="day",
        ),
    ],
)
def test_a_slow_change_is_followed(
    curve: Curve, seconds: float, num_turns: int, late: float, over: float
) -> None:
    found = run(curve, seconds)

    assert found.num_turns <= num_turns
    assert found.late() <= late
    assert found.slow <= 0.1
    assert found.over <= over
    assert found.under <= 0.05


def test_a_burst_is_not_answered_with_replicas_that_come_after_it() -> None:
    found = run(lambda t: ONE * (6 if 200 <= t < 230 else 0.6), 700)

    assert max(number for _, number in found.targets) <= 5
    assert found.target_at(600) <= 2


def test_a_constant_load_settles() -> None:
    found = run(lambda _: ONE * 2.5, 2400)

    assert found.num_turns <= 3
    assert {number for at, number in found.targets if at > 1200} <= {3, 4}
    assert found.late(since=200) <= 0.05


@pytest.mark.parametrize("period_s", [20, 60, 100])
def test_a_load_that_swings_about_a_threshold_does_not_flap(period_s: int) -> None:
    found = run(lambda t: ONE * (0.8 + 0.5 * (t % period_s) / period_s), 1800)

    assert found.num_turns <= 4
    assert found.slow <= 0.1


def test_silence_ends_in_no_replicas_and_one_request_brings_one_back() -> None:
    found = run(
        lambda t: ONE * 0.1 if t < 60 or 400 <= t < 401 else 0.0, 700, low=0, initial=0, most=3
    )

    zeros = [at for (at, number) in found.targets if number == 0]
    assert [number for _, number in found.targets] == [0, 1, 0, 1, 0]
    assert zeros[1] == pytest.approx(60 + TARGETS["to_zero_delay_s"], abs=30)
    woken = [job for job in found.jobs if job.arrived >= 400]
    assert all(job.first_at is not None and job.first_at - 400 < START_S + 5 for job in woken)


def test_the_number_stays_within_bounds() -> None:
    found = run(lambda t: ONE * 8 if t < 100 else 0.0, 600, low=2, most=6)
    assert {number for _, number in found.targets} <= set(range(2, 7))
    assert max(number for _, number in found.targets) == 6
    assert found.targets[-1][1] == 2


def test_growth_is_gradual_while_replicas_start() -> None:
    found = run(lambda _: ONE * 8, 120, most=20)
    for (_, before), (_, after) in pairwise(found.targets):
        assert after <= max(2 * before, before + 2)
