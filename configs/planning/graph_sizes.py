"""Batch sizes for which decode steps are captured as CUDA graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def graph_sizes(*, most: int, split: int = 256, fine: int = 8, step: int = 16) -> tuple[int, ...]:
    """Return batch sizes, ascending, the last one `most`.

    most:   largest size; 0 = no graphs
    split:  up to this size 1, 2, 4 and multiples of `fine`, where padding costs most
    step:   above `split`, its multiples
    """
    small = (1, 2, 4, *range(fine, split + 1, fine))
    large = range((split // step + 1) * step, most, step)
    sizes = {size for size in (*small, *large) if size < most}
    return (*sorted(sizes), most) if most > 0 else ()


def size_for(num_rows: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of the ascending sizes with at least `num_rows` rows, or None."""
    place = bisect_left(sizes, num_rows)
    return sizes[place] if place < len(sizes) else None
