"""Layers share a step's plan of splits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from remora.engine.attention.split_plans import SplitPlans
from remora.engine.runner.batch import ForwardBatch
from remora.kernels.attention.split_plan import SplitPlan


def make_batch(lengths: Tensor) -> ForwardBatch:
    nothing = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        token_ids=nothing,
        positions=nothing,
        slots=nothing,
        num_decodes=len(lengths),
        tables=nothing,
        starts=nothing,
        lengths=lengths,
        extend_starts=(),
        extend_lens=(),
        logit_index=nothing,
    )


def test_a_plan_is_made_once_for_each_window_of_a_step() -> None:
    plans = SplitPlans()
    made: list[SplitPlan] = []

    def make() -> SplitPlan:
        made.append(SplitPlan(torch.empty(0), torch.empty(0)))
        return made[-1]

    first = make_batch(torch.tensor([3, 4]))
    second = replace(first)  # over the same tensors, as uploads of the same shapes are
    of_first = [plans.get(first, window, make) for window in (None, 16, None, 16)]
    of_second = [plans.get(second, window, make) for window in (None, None)]

    assert [id(plan) for plan in of_first] == [id(made[place]) for place in (0, 1, 0, 1)]
    assert [id(plan) for plan in of_second] == [id(made[2])] * 2
    assert len(made) == 3
