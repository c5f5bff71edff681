"""Integers within bounds as patterns."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from remora.engine.grammar.json_schema.integers import integers
from remora.engine.grammar.regex import render

NUMBERS = st.one_of(st.integers(-30, 30), st.integers(-100_000, 100_000))


@given(low=st.none() | NUMBERS, size=st.none() | st.integers(0, 20_000), numbers=st.lists(NUMBERS))
def test_exactly_the_integers_within_bounds_match(
    low: int | None, size: int | None, numbers: list[int]
) -> None:
    high = None if size is None else (low or 0) + size
    pattern = re.compile(render(integers(low, high)))
    edges = [edge + step for edge in (low, high) if edge is not None for step in (-1, 0, 1)]

    for number in [*numbers, *edges, 0]:
        fits = (low is None or low <= number) and (high is None or number <= high)
        assert bool(pattern.fullmatch(str(number))) == fits


def test_no_integer_is_written_in_two_ways() -> None:
    pattern = re.compile(render(integers(None, None)))

    assert not [text for text in ("-0", "01", "+1", "1.0", "") if pattern.fullmatch(text)]
