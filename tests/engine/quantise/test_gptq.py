"""GPTQ against rounding to the same grid, and against trying all codes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.configs.errors import ConfigError
from remora.engine.quantise.gptq import gptq, loss
from remora.engine.quantise.search import Scheme, round_to_grid, search_grid
from tests.engine.quantise.cases import SCHEMES, correlated_inputs, some_weight


@settings(max_examples=25)
@given(
    scheme=st.sampled_from(SCHEMES),
    num_groups=st.integers(1, 3),
    outputs=st.integers(1, 9),
    rows=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_its_loss_is_at_most_that_of_rounding(
    scheme: Scheme, num_groups: int, outputs: int, rows: int, seed: int
) -> None:
    inputs = num_groups * scheme.group_size
    weight, x = some_weight(outputs, inputs, seed), correlated_inputs(rows, inputs, seed)
    gram = x.T @ x

    found = gptq(weight, gram, scheme)

    plain = round_to_grid(weight, search_grid(weight, scheme, gram.diagonal()), scheme)
    assert (loss(weight, found, gram) <= loss(weight, plain, gram)).all()
    assert found.codes.max() <= scheme.top


def test_correlated_inputs_are_made_up_for() -> None:
    scheme = SCHEMES[0]
    weight, x = some_weight(64, 128, 0), correlated_inputs(2000, 128, 1)
    gram = x.T @ x

    found = gptq(weight, gram, scheme)

    plain = round_to_grid(weight, search_grid(weight, scheme), scheme)
    of_found, of_plain = (
        (x @ (weight - each.dequantised()).T).square().sum() for each in (found, plain)
    )
    assert of_found < 0.5 * of_plain


def test_loss_is_the_squared_error_of_products() -> None:
    weight, x = some_weight(5, 64, 0), correlated_inputs(50, 64, 1)
    rounded = round_to_grid(weight, search_grid(weight, SCHEMES[0]), SCHEMES[0])

    expected = (x @ (weight - rounded.dequantised()).T).square().sum(0)

    torch.testing.assert_close(loss(weight, rounded, x.T @ x), expected, rtol=1e-3, atol=1e-4)


def test_an_input_that_is_always_zero_is_rounded_alone() -> None:
    scheme, weight, x = SCHEMES[0], some_weight(4, 64, 0), correlated_inputs(100, 64, 1)
    x[:, 7] = 0

    found = gptq(weight, x.T @ x, scheme)

    spacing = found.scales.float()[:, 7 // scheme.group_size]
    assert ((found.dequantised()[:, 7] - weight[:, 7]).abs() <= 4 * spacing).all()


def test_inputs_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ConfigError, match="not finite"):
        gptq(some_weight(4, 64, 0), torch.full((64, 64), torch.inf), SCHEMES[0])
