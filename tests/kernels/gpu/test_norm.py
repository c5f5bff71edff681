"""Norms by kernels against torch in float64, from the same rounded inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.norm import add_rms_norm, rms_norm, rms_norm_reference
from tests.kernels.gpu.devices import interpreted_only, poisoned_memory

EPS = 1e-5
# Twice half a unit in the last place: rounded before the weight and after it. Of float32 the sum
# of the squares and its root add a few more.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def check(normed: Tensor, x: Tensor, weight: Tensor) -> None:
    """Compare with what torch makes of the same numbers in float64."""
    expected = rms_norm_reference(x.double().cpu(), weight.double().cpu(), EPS)
    tolerance = TOLERANCES[x.dtype]
    assert normed.dtype == x.dtype
    torch.testing.assert_close(
        normed.double().cpu(), expected, rtol=tolerance, atol=0.1 * tolerance
    )


def norm_and_check(x: Tensor) -> None:
    """Normalise rows alone, and after adding them to others."""
    torch.manual_seed(0)
    weight = (torch.rand(x.shape[-1], device=x.device) + 0.5).to(x.dtype)
    residual = torch.randn(x.shape, device=x.device).to(x.dtype)
    before, expected = x.clone(), residual + x

    with poisoned_memory():
        normed = rms_norm(x, weight, EPS)
        added, stream = add_rms_norm(x, residual, weight, EPS)

    check(normed, x, weight)
    assert stream is residual
    assert torch.equal(residual, expected)
    check(added, expected, weight)
    assert torch.equal(x, before)


@interpreted_only
@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(1, 5), max_size=2),
    dim=st.integers(1, 300),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_rows_of_any_shape_agree_with_torch(shape: list[int], dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    norm_and_check((3 * torch.randn(*shape, dim)).to(dtype))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 64), (1, 4096), (3, 576), (9, 2, 128), (2, 16384), (1, 32768)]
)
def test_rows_of_models_agree_with_torch(
    device: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    norm_and_check((3 * torch.randn(shape, device=device)).to(dtype))


def test_heads_in_a_wider_tensor_are_normalised_and_the_tensor_left_alone(device: str) -> None:
    torch.manual_seed(0)
    fused = torch.randn(5, 8 * 80 + 3, device=device)
    before = fused.clone()
    heads = fused[:, 80 : 80 + 3 * 80].view(5, 3, 80)
    weight = torch.rand(80, device=device)

    with poisoned_memory():
        normed = rms_norm(heads, weight, EPS)

    check(normed, heads, weight)
    assert normed.is_contiguous()
    assert torch.equal(fused, before)


def test_a_residual_in_a_wider_tensor_is_changed_in_place_and_nothing_beside_it(
    device: str,
) -> None:
    torch.manual_seed(0)
    wide, x, weight = (torch.randn(shape, device=device) for shape in ((4, 90), (4, 48), (48,)))
    before = wide.clone()

    add_rms_norm(x, wide[:, 16:64], weight, EPS)

    before[:, 16:64] += x
    assert torch.equal(wide, before)


def test_large_half_precision_values_do_not_overflow(device: str) -> None:
    x = torch.full((1, 64), 3e4, dtype=torch.float16, device=device)

    normed = rms_norm(x, torch.ones_like(x[0]), EPS)

    assert normed.tolist() == torch.ones(1, 64).tolist()


def test_a_row_does_not_depend_on_the_rows_beside_it(device: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(33, 100, device=device), torch.rand(100, device=device)

    together = rms_norm(x, weight, EPS)

    assert torch.equal(together[20:21], rms_norm(x[20:21], weight, EPS))
