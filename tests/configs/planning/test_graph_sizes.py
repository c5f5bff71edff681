"""Sizes of captured decode steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.planning.graph_sizes import graph_sizes, prompt_sizes, size_for


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


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (0, ()),
        (1, ()),
        (2, (2,)),
        (16, (16,)),
        (40, (16, 32, 40)),
        (300, (*range(16, 257, 16), 288, 300)),
    ],
)
def test_numbers_of_tokens_begin_in_small_steps(most: int, expected: tuple[int, ...]) -> None:
    assert prompt_sizes(most) == expected


@given(st.integers(17, 5000))
def test_a_step_with_prompts_is_padded_by_less_than_an_eighth(most: int) -> None:
    sizes = prompt_sizes(most)

    assert sizes[-1] == most
    for num_tokens in range(16, most + 1, 7):
        size = size_for(num_tokens, sizes)
        assert size is not None
        assert size - num_tokens < max(16, num_tokens / 8)
