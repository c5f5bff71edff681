"""Sizes of captured decode steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.planning.graph_sizes import graph_sizes, size_for


@pytest.mark.parametrize(
    ("most", "split", "fine", "step", "expected"),
    [
        (0, 256, 8, 16, ()),
        (1, 256, 8, 16, (1,)),
        (64, 256, 8, 16, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (100, 32, 8, 32, (1, 2, 4, 8, 16, 24, 32, 64, 96, 100)),
        (12, 6, 1, 4, (1, 2, 3, 4, 5, 6, 8, 12)),
    ],
)
def test_sizes_lie_close_where_a_padded_row_costs_much(
    most: int, split: int, fine: int, step: int, expected: tuple[int, ...]
) -> None:
    assert graph_sizes(most=most, split=split, fine=fine, step=step) == expected


@given(st.integers(1, 600), st.integers(1, 300), st.integers(1, 16), st.integers(1, 64))
def test_each_batch_has_the_least_size_that_holds_it(
    most: int, split: int, fine: int, step: int
) -> None:
    sizes = graph_sizes(most=most, split=split, fine=fine, step=step)

    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        assert size_for(rows, sizes) == min(size for size in sizes if size >= rows)
    assert size_for(most + 1, sizes) is None
