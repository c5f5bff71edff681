"""Kernels of products with quantised weights against the torch code."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import remora.kernels.gpu.linear_quant as kernels
from remora.kernels.quantised.linear_quant import linear_quant, linear_quant_reference
from remora.kernels.quantised.quant_formats import QuantisedWeight
from tests.kernels.gpu.devices import interpreted_only, on_gpu, poisoned
from tests.kernels.quantised_weights import MAKERS
from tests.thinned import thinned

# Rows are quantised to the same bits, so what differs is the order of float32 sums, and the
# rounding of y: half an ulp and a little.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCES)
FP8 = [name for name in MAKERS if name.startswith("fp8")]


def check(
    weight: QuantisedWeight, x: Tensor, bias: Tensor | None, *, expected: Tensor | None = None
) -> None:
    """Compare with the torch code; errors are counted against the size of what is summed."""
    y = poisoned(len(x), len(weight.values), dtype=x.dtype, device=str(x.device))

    made = linear_quant(x, weight, bias, out=y)

    assert made is y
    if expected is None:
        expected = linear_quant_reference(x.float(), weight, bias)
    size = x.float().square().sum(1, keepdim=True).sqrt() * weight.dequantised().norm(dim=1)
    error = (y.float() - expected).abs() - TOLERANCES[x.dtype] * expected.abs()
    # Tensor cores add 32 products of float8 to 13 bits of the greatest of them.
    of_sum = 1e-3 if x.is_cuda and weight.values.dtype == torch.float8_e4m3fn else 1e-5
    assert (error <= of_sum * size + 1e-6).all(), error.max()


def random_case(
    name: str, rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str
) -> tuple[QuantisedWeight, Tensor, Tensor]:
    x = torch.randn(rows, inputs, device=device).to(dtype)
    return MAKERS[name](outputs, inputs, device), x, torch.randn(outputs, device=device).to(dtype)


SIZES = (
    (1, 256, torch.bfloat16),
    (3, 2100, torch.bfloat16),  # in splits
    (40, 256, torch.float16),
    (130, 256, torch.bfloat16),
    (5, 256, torch.float32),
)


@pytest.mark.parametrize(
    ("name", "rows", "inputs", "dtype"),
    thinned(((name, *size) for name, size in product(MAKERS, SIZES)), 2),
    ids=str,
)
def test_every_weight_and_tile_agrees_with_torch(
    device: str, name: str, rows: int, inputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    weight, x, bias = random_case(name, rows, 70, inputs, dtype, device)

    check(weight, x, bias)


@interpreted_only
@settings(max_examples=16)
@given(
    name=st.sampled_from(list(MAKERS)),
    rows=st.integers(0, 35),
    outputs=st.integers(1, 140),
    inputs=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_ragged_products_agree_with_torch(has_bias: bool, seed: int, **sizes: Any) -> None:
    torch.manual_seed(seed)
    weight, x, bias = random_case(**sizes, device="cpu")

    check(weight, x, bias if has_bias else None)


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize(
    ("rows", "inputs", "dtype"),
    [(2, 1100, torch.bfloat16), (70, 200, torch.float16), (2, 200, torch.float32)],
    ids=str,
)
def test_without_products_of_float8_rows_stay_as_they_are(
    device: str,
    name: str,
    rows: int,
    inputs: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "has_fp8", lambda device: False)
    torch.manual_seed(0)
    weight, x, bias = random_case(name, rows, 140, inputs, dtype, device)

    expected = x.float() @ weight.dequantised().T + bias.float()
    check(weight, x, bias, expected=expected)


@pytest.mark.parametrize("name", MAKERS)
def test_rows_may_be_parts_of_wider_ones(device: str, name: str) -> None:
    torch.manual_seed(0)
    weight, x, _ = random_case(name, 3, 20, 200, torch.float32, device)
    wide = torch.full((3, 500), float("nan"), device=device)
    wide[:, 150:350] = x

    check(weight, wide[:, 150:350], None)


@on_gpu
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("rows", [1, 16, 64, 512])
def test_products_of_a_models_size_agree_with_torch(name: str, rows: int) -> None:
    torch.manual_seed(0)
    weight, x, bias = random_case(name, rows, 4096, 14336, torch.bfloat16, "cuda")

    check(weight, x, bias)


@pytest.mark.parametrize("name", MAKERS)
def test_shapes_that_do_not_fit_are_refused(device: str, name: str) -> None:
    weight, x, _ = random_case(name, 2, 16, 128, torch.float32, device)

    with pytest.raises(ValueError, match="for a weight of 128 inputs"):
        linear_quant(x[:, :100], weight)
    with pytest.raises(ValueError, match="out is"):
        linear_quant(x, weight, out=torch.empty(2, 16, dtype=torch.float16, device=device))
