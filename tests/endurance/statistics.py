"""Percentiles and slopes that a few outliers do not move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope of all pairs of points (Theil and Sen); 0 for fewer than two."""
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
        if later[0] > earlier[0]
    ]
    return median(slopes) if slopes else 0.0
