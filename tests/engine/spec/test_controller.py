"""Draft lengths in simulated steps: measured costs and acceptance lead to the best length.

Step times follow curves that were measured on a CPU; time is simulated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from remora.engine.spec.controller import AdaptiveController, Controller, FixedController
from remora.engine.spec.step_cost import StepCost

MAX_DRAFTS = 11
# Times of a step by its tokens, in times of a step with one.
BF16 = {1: 1.0, 2: 1.02, 4: 1.04, 8: 1.24, 16: 1.76, 32: 3.1, 512: 48.0}
INT8 = {1: 1.0, 2: 1.04, 4: 1.3, 6: 1.65, 8: 1.8, 12: 2.2, 16: 2.8, 512: 85.0}
Curve = Mapping[int, float]


def cost(curve: Curve, num_tokens: int) -> float:
    below = max(count for count in curve if count <= num_tokens)
    above = min(count for count in curve if count >= num_tokens)
    share = (num_tokens - below) / max(1, above - below)
    return curve[below] + share * (curve[above] - curve[below])


def speed(
    controller: Controller,
    curve: Curve,
    acceptance: Callable[[int, int], float],
    *,
    num_rows: int = 1,
    num_steps: int = 4000,
    noise: float = 0.05,
) -> float:
    """Return tokens per second after a quarter of the steps, for settling.

    acceptance:  by row and step, of every draft alone
    """
    draw = random.Random(0)
    tokens = seconds = 0.0
    for step in range(num_steps):
        limits = [controller.limit(row, num_rows) for row in range(num_rows)]
        output = 0
        for row, limit in enumerate(limits):
            accepted = 0
            while accepted < limit and draw.random() < acceptance(row, step):
                accepted += 1
            controller.observe(row, limit, accepted)
            output += 1 + accepted
        exact = cost(curve, num_rows + sum(limits))
        measured = exact * draw.uniform(1 - noise, 1 + noise)
        if draw.random() < 0.02:
            measured *= 4  # the machine did something else
        controller.observe_step(num_rows + sum(limits), 0.01 * measured)
        if step >= num_steps // 4:
            tokens, seconds = tokens + output, seconds + exact
    return tokens / seconds


def best_fixed(curve: Curve, rate: float, num_rows: int = 1) -> float:
    """Return the most tokens per second that a fixed length yields on average."""
    return max(
        num_rows
        * sum(rate**count for count in range(length + 1))
        / cost(curve, num_rows * (1 + length))
        for length in range(MAX_DRAFTS + 1)
    )


@pytest.mark.parametrize("curve", [BF16, INT8], ids=["bf16", "int8"])
@pytest.mark.parametrize("rate", [0.2, 0.3, 0.5, 0.7, 0.8, 0.9])
def test_one_row_is_nearly_as_fast_as_with_the_best_fixed_length(curve: Curve, rate: float) -> None:
    found = speed(AdaptiveController(MAX_DRAFTS), curve, lambda row, step: rate)
    assert found > 0.94 * best_fixed(curve, rate)


@pytest.mark.parametrize("num_rows", [2, 8])
@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_several_rows_are_nearly_as_fast_as_with_the_best_fixed_length(
    num_rows: int, rate: float
) -> None:
    found = speed(AdaptiveController(MAX_DRAFTS), INT8, lambda row, step: rate, num_rows=num_rows)
    assert found > 0.94 * best_fixed(INT8, rate, num_rows)


@pytest.mark.parametrize("curve", [BF16, INT8], ids=["bf16", "int8"])
@pytest.mark.parametrize("num_rows", [1, 4, 8, 32])
def test_useless_drafts_cost_at_most_three_percent(curve: Curve, num_rows: int) -> None:
    controller = AdaptiveController(MAX_DRAFTS)
    found = speed(controller, curve, lambda row, step: 0.0, num_rows=num_rows, num_steps=2000)
    assert found >= 0.97 * num_rows / cost(curve, num_rows)


def test_drafts_stop_above_the_batch_size_where_they_pay() -> None:
    steep = {1: 1.0, 2: 1.0, 16: 16.0, 512: 512.0}  # every token costs the same from 2 on
    controller = AdaptiveController(MAX_DRAFTS)
    found = speed(controller, steep, lambda row, step: 0.6, num_rows=8, num_steps=2000)
    assert found >= 0.97 * 8 / cost(steep, 8)


def test_a_row_that_never_accepts_is_off_while_another_one_drafts() -> None:
    controller = AdaptiveController(MAX_DRAFTS)
    speed(controller, BF16, lambda row, step: 0.9 * row, num_rows=2, num_steps=500)
    limits = [[controller.limit(row, 2) for row in (0, 1)] for _ in range(20)]
    assert sum(useless for useless, _ in limits) <= 1
    assert min(useful for _, useful in limits) >= 4


def test_a_row_that_begins_to_accept_gets_drafts_again() -> None:
    controller = AdaptiveController(MAX_DRAFTS)
    speed(controller, BF16, lambda row, step: 0.0 if step < 1000 else 0.9, num_steps=1400)
    assert controller.limit(0, 1) >= 4


def test_drafts_that_take_no_time_pay_where_slow_ones_do_not() -> None:
    controller = AdaptiveController(MAX_DRAFTS)
    speed(controller, BF16, lambda row, step: 0.6, num_steps=500)
    for _ in range(10):
        controller.observe_drafting(1, 2 * BF16[1])
    assert min(controller.limit(0, 1) for _ in range(10)) == 0
    assert min(controller.limit(0, 1, is_free=True) for _ in range(10)) >= 2


def test_a_new_row_starts_with_the_rates_of_the_rows_before() -> None:
    useful, useless = AdaptiveController(MAX_DRAFTS), AdaptiveController(MAX_DRAFTS)
    speed(useful, BF16, lambda row, step: 0.9, num_steps=500)
    speed(useless, BF16, lambda row, step: 0.0, num_steps=500)
    for controller in (useful, useless):
        controller.end(0)
    assert useful.limit(1, 1) >= 4
    assert [useless.limit(1, 1) for _ in range(3)] == [1, 1, 1]  # a probe, until there are drafts
    useless.observe(1, 1, 0)
    assert [useless.limit(1, 1) for _ in range(10)] == [0] * 10


def test_predicted_drafts_change_the_rates_of_their_own_row_only() -> None:
    drafted, disturbed = AdaptiveController(MAX_DRAFTS), AdaptiveController(MAX_DRAFTS)
    for controller in (drafted, disturbed):
        speed(controller, BF16, lambda row, step: 0.8, num_steps=500)
        controller.end(0)
    for row in range(1, 300):  # each with a wrong prediction
        for _ in range(20):
            if limit := disturbed.limit(row, 1, is_free=True):
                disturbed.observe(row, limit, 0, is_predicted=True)
        assert disturbed.limit(row, 1) <= 1
        disturbed.end(row)
    assert disturbed.limit(99, 1) == drafted.limit(99, 1) >= 4


def test_drafts_of_ended_rows_do_not_count() -> None:
    controller = AdaptiveController(MAX_DRAFTS)
    for row in range(20):
        controller.limit(row, 20)
        controller.observe(row, 5, 5)
    for row in range(20):
        controller.end(row)
        controller.end(row)
        controller.observe(row, 5, 5)
    for count in range(1, 60):
        controller.observe_step(count, 1 + 0.1 * max(0, count - 12))
    assert controller.limit(99, 1) >= 4


@pytest.mark.parametrize("length", [0, 3])
def test_a_fixed_length_never_changes(length: int) -> None:
    controller = FixedController(length)
    controller.observe(0, 3, 0)
    controller.observe_step(4, 100.0)
    controller.end(0)
    assert [controller.limit(0, rows) for rows in (1, 100)] == [length, length]


def test_costs_are_medians_and_interpolated() -> None:
    table = StepCost()
    assert table.seconds(11) == pytest.approx(2 * table.seconds(1))
    for seconds in (0.010, 0.011, 0.200, 0.0):
        table.observe(4, seconds)
    assert table.seconds(4) == 0.011
    table.observe(8, 0.015)
    assert table.seconds(6) == pytest.approx(0.013)
    assert table.seconds(16) > 0.015
    assert table.seconds(2) < 0.011
