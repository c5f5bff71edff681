"""Sizes for which steps are captured as CUDA graphs: rows that decode, or tokens with prompts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MAX_PROMPTS = 64  # of a captured step: each row that it could have costs attention some time
MIN_TOKENS = 16  # of the smallest captured step with prompts
PARTS = 8  # of an octave of numbers of tokens, at least `MIN_TOKENS` long


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


def prompt_sizes(most: int) -> tuple[int, ...]:
    """Return numbers of tokens, ascending, the last one `most`; 0 = none.

    Padding is less than `MIN_TOKENS` or an eighth of a step: small steps wait for launches, not for
    products.
    """
    sizes, size = [], MIN_TOKENS
    while size < most:
        sizes.append(size)
        size += max(MIN_TOKENS, (1 << (size.bit_length() - 1)) // PARTS)
    return (*sizes, most) if most > 1 else ()


def size_for(num_rows: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of the ascending sizes that is at least `num_rows`, or None."""
    place = bisect_left(sizes, num_rows)
    return sizes[place] if place < len(sizes) else None
