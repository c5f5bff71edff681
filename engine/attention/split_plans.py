"""Plans of a step's decode splits, which all its layers share.

Knows nothing of what a plan holds.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from remora.kernels.attention.split_plan import SplitPlan


class SplitPlans:
    """The plans of one step, one for each attention window."""

    def __init__(self) -> None:
        self._lengths: Tensor | None = None
        self._plans: dict[int | None, SplitPlan | None] = {}

    def get(
        self, lengths: Tensor, window: int | None, make: Callable[[], SplitPlan | None]
    ) -> SplitPlan | None:
        """Return the plan for a window, made by the step's first layer that has it.

        lengths:  of the step's rows; another tensor object is another step
        """
        if lengths is not self._lengths:
            self._lengths = lengths
            self._plans.clear()
        if window not in self._plans:
            self._plans[window] = make()
        return self._plans[window]
