"""Searched grids against plain minima and maxima, and at their edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.engine.quantise.search import Grid, Scheme, round_to_grid, search_grid
from tests.engine.quantise.cases import SCHEMES, some_weight


def min_max_grid(weight: Tensor, scheme: Scheme) -> Grid:
    """Return the grid of each group's full range."""
    grouped = weight.view(len(weight), -1, scheme.group_size)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if scheme.symmetric:
        scales = torch.maximum(-low / scheme.middle, high / (scheme.middle - 1))
        zeros = torch.full_like(scales, scheme.middle)
    else:
        scales = (high - low) / scheme.top
        zeros = (-low / scales).round()
    return Grid(scales.to(scheme.scale_dtype), zeros.to(torch.uint8))


@settings(max_examples=25)
@given(
    scheme=st.sampled_from(SCHEMES),
    outputs=st.integers(1, 9),
    num_groups=st.integers(1, 3),
    seed=st.integers(0, 1000),
    is_weighted=st.booleans(),
)
def test_no_group_is_worse_than_with_its_full_range(
    scheme: Scheme, outputs: int, num_groups: int, seed: int, is_weighted: bool
) -> None:
    weight = some_weight(outputs, num_groups * scheme.group_size, seed)
    generator = torch.Generator().manual_seed(seed)
    importance = torch.rand(weight.shape[1], generator=generator) if is_weighted else None
    factors = torch.ones(weight.shape[1]) if importance is None else importance

    searched, plain = (
        round_to_grid(weight, grid, scheme).dequantised()
        for grid in (search_grid(weight, scheme, importance), min_max_grid(weight, scheme))
    )

    of_searched, of_plain = (
        ((each - weight).square() * factors).view(len(weight), num_groups, -1).sum(-1)
        for each in (searched, plain)
    )
    assert (of_searched <= of_plain * (1 + 1e-4)).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [0.0, 0.5, -0.25])
def test_groups_of_one_number_are_exact(scheme: Scheme, value: float) -> None:
    weight = torch.full((3, 2 * scheme.group_size), value)

    rounded = round_to_grid(weight, search_grid(weight, scheme), scheme).dequantised()

    torch.testing.assert_close(rounded, weight, rtol=2**-8, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_on_a_grid_stay(scheme: Scheme) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, scheme.top + 1, (8, scheme.group_size), generator=generator)
    codes[:, 0], codes[:, 1] = 0, scheme.top
    weight = (codes - scheme.middle) * 2.0**-6

    rounded = round_to_grid(weight, search_grid(weight, scheme), scheme).dequantised()

    assert torch.equal(rounded, weight)


def test_rows_do_not_depend_on_the_rows_around_them() -> None:
    scheme, weight = SCHEMES[0], some_weight(6, 64, 3)

    whole, alone = search_grid(weight, scheme), search_grid(weight[2:3], scheme)

    assert torch.equal(whole.scales[2:3], alone.scales)
    assert torch.equal(whole.zeros[2:3], alone.zeros)
