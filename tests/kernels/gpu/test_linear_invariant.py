"""Kernels of products whose rows do not depend on each other: against torch, and by bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import remora.kernels.gpu.linear_invariant as kernels
from remora.kernels.linear_invariant import linear_invariant
from tests.kernels.gpu.devices import interpreted_only, on_gpu, poisoned

# Of sums of about one, rounded once.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCES)


def random_case(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, inputs, device=device)
    weight = torch.randn(outputs, inputs, device=device) / inputs**0.5
    bias = torch.randn(outputs, device=device)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    y = poisoned(len(x), len(weight), dtype=x.dtype, device=str(x.device))

    linear_invariant(x, weight, bias, out=y)

    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    tolerance = TOLERANCES[x.dtype]
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 1100), (70, 128)])
def test_products_agree_with_torch(device: str, dtype: torch.dtype, rows: int, inputs: int) -> None:
    torch.manual_seed(0)

    check(*random_case(rows, 140, inputs, dtype, device))


@interpreted_only
@settings(max_examples=15)
@given(
    rows=st.integers(0, 20),
    outputs=st.integers(1, 140),
    inputs=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
)
def test_ragged_products_agree_with_torch(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool
) -> None:
    torch.manual_seed(0)
    x, weight, bias = random_case(rows, outputs, inputs, dtype, "cpu")

    check(x, weight, bias if has_bias else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_has_the_same_bits_in_any_company(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = random_case(70, 40, 200, dtype, device)
    together = linear_invariant(x, weight, bias)

    for rows in (*range(1, 6), 15, 16, 17, 31, 33, 63, 64, 65, 69, 70):
        others = torch.randn_like(x[:rows])
        others[-1] = x[rows - 1]
        assert torch.equal(linear_invariant(others, weight, bias)[-1], together[rows - 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_parts_have_the_same_bits_in_one_program_and_in_several(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    case = random_case(3, 20, 2500, dtype, device)
    several = linear_invariant(*case)

    monkeypatch.setattr(kernels, "ENOUGH_TILES", 0)

    assert torch.equal(linear_invariant(*case), several)


@on_gpu
def test_rows_of_a_models_size_have_the_same_bits_in_any_company() -> None:
    torch.manual_seed(0)
    x, weight, bias = random_case(3000, 4096, 14336, torch.bfloat16, "cuda")
    together = linear_invariant(x, weight, bias)

    for rows in (1, 7, 64, 100, 257, 2048):
        assert torch.equal(linear_invariant(x[:rows], weight, bias), together[:rows])
    check(x[:100], weight, bias)


def test_shapes_and_types_that_do_not_fit_are_refused(device: str) -> None:
    x, weight, _ = random_case(2, 8, 16, torch.float32, device)

    with pytest.raises(ValueError, match="rows of 15"):
        linear_invariant(x[:, :15], weight)
    with pytest.raises(ValueError, match="rows of 16"):
        linear_invariant(x.half(), weight)
    with pytest.raises(ValueError, match="out is"):
        linear_invariant(x, weight, out=x)
