"""Plans of a step's decode splits, which all its layers share.

Knows nothing of what a plan holds.
"""

from __future__ import annotations

from collections.abc import Callable

from remora.engine.runner.batch import ForwardBatch
from remora.kernels.attention.split_plan import SplitPlan


class SplitPlans:
    """The plans of one step, one for each attention window."""

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self._plans: dict[int | None, SplitPlan | None] = {}

    def get(
        self, batch: ForwardBatch, window: int | None, make: Callable[[], SplitPlan | None]
    ) -> SplitPlan | None:
        """Return the plan for a window, made by the step's first layer that has it.

        batch:  the step's; another object is another step, though its tensors may be the same ones
        """
        if batch is not self._batch:
            self._batch = batch
            self._plans.clear()
        if window not in self._plans:
            self._plans[window] = make()
        return self._plans[window]
