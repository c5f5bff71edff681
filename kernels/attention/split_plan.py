"""How Triton's kernels divide the keys of decode rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Splits of a step's rows; the same for all layers with the same window.

    items:  [I, 5] int32; of each split its row (-1 = unused), the row's first item and number of
            items, and the half-open range of keys
    rows:   [D, 2] int32, each row's first item and number of items
    """

    items: Tensor
    rows: Tensor
