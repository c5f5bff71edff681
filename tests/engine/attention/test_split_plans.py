"""Layers share a step's plan of splits."""

from __future__ import annotations

import torch

from remora.engine.attention.split_plans import SplitPlans
from remora.kernels.attention.split_plan import SplitPlan


def test_a_plan_is_made_once_for_each_window_of_a_step() -> None:
    plans = SplitPlans()
    made: list[SplitPlan] = []

    def make() -> SplitPlan:
        made.append(SplitPlan(torch.empty(0), torch.empty(0)))
        return made[-1]

    first, second = torch.tensor([3, 4]), torch.tensor([3, 4])
    of_first = [plans.get(first, window, make) for window in (None, 16, None, 16)]
    of_second = [plans.get(second, window, make) for window in (None, None)]

    assert [id(plan) for plan in of_first] == [id(made[place]) for place in (0, 1, 0, 1)]
    assert [id(plan) for plan in of_second] == [id(made[2])] * 2
    assert len(made) == 3
