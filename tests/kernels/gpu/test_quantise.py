"""Kernels that quantise activations against the torch code, by bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.gpu.quantise import MAX_BLOCK
from remora.kernels.quantised import quantise
from tests.kernels.gpu.devices import interpreted_only

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAKERS = {
    "int8": (quantise.quantise_int8, quantise.quantise_int8_reference),
    "fp8": (quantise.quantise_fp8, quantise.quantise_fp8_reference),
    "fp8 groups": (quantise.quantise_fp8_groups, quantise.quantise_fp8_groups_reference),
}


def make_rows(rows: int, inputs: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return rows of all sizes, with numbers of all sizes, and one of zeros."""
    sizes = torch.logspace(-4, 1, inputs) * torch.logspace(-1, 1, rows)[:, None]
    x = (torch.randn(rows, inputs) * sizes).to(device, dtype)
    x[rows // 2] = 0
    return x


def assert_same(made: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(made[0].view(torch.int8).cpu(), expected[0].view(torch.int8))
    assert torch.equal(made[1].cpu(), expected[1])


def check(name: str, x: Tensor) -> None:
    make, reference = MAKERS[name]
    assert_same(make(x), reference(x.cpu()))


@pytest.mark.parametrize(
    ("name", "rows", "inputs", "dtype"),
    [
        *((name, 5, 700, dtype) for name in MAKERS for dtype in DTYPES),
        # Rows that no program holds are read in blocks.
        *((name, 2, 2 * MAX_BLOCK + 5, torch.bfloat16) for name in ("int8", "fp8")),
    ],
    ids=str,
)
def test_rows_are_quantised_to_the_bits_of_torch(
    device: str, name: str, rows: int, inputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)

    check(name, make_rows(rows, inputs, dtype, device))


@interpreted_only
@settings(max_examples=15)
@given(
    name=st.sampled_from(list(MAKERS)),
    rows=st.integers(1, 4),
    inputs=st.integers(1, 1300),
    seed=st.integers(0, 9),
)
def test_rows_of_any_length_are_quantised(name: str, rows: int, inputs: int, seed: int) -> None:
    torch.manual_seed(seed)

    check(name, make_rows(rows, inputs, torch.float32, "cpu"))


def test_every_number_of_float16_is_rounded_to_the_nearest_of_float8(device: str) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.float16)
    x = x[x.isfinite()].view(31, -1)
    scale = torch.ones(1)

    assert_same(
        quantise.quantise_fp8(x.to(device), scale.to(device)),
        quantise.quantise_fp8_reference(x, scale),
    )


def test_rows_may_be_parts_of_wider_ones(device: str) -> None:
    torch.manual_seed(0)
    x = make_rows(3, 600, torch.bfloat16, device)[:, 130:430]

    for name in MAKERS:
        check(name, x)


def test_no_rows_are_quantised_to_none(device: str) -> None:
    x = torch.empty(0, 256, device=device)

    assert [tuple(each.shape) for each in quantise.quantise_int8(x)] == [(0, 256), (0,)]
    assert [tuple(each.shape) for each in quantise.quantise_fp8_groups(x)] == [(0, 256), (2, 0)]
