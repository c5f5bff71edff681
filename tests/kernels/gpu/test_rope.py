"""Rotations by kernels against torch in float64, from the same rounded inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.rope import apply_rope, apply_rope_reference
from tests.kernels.gpu.devices import interpreted_only, poisoned_memory

# Half a unit in the last place of sums of two products, which may cancel: relative to what is added
# up, here numbers of at most about 4. Of float32 a product is rounded as well.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def angles(num_tokens: int, pairs: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    at = torch.rand(num_tokens, pairs, device=device) * 7
    return at.cos().to(dtype), at.sin().to(dtype)


def rotate_and_check(x: Tensor, pairs: int, *, interleaved: bool) -> None:
    cos, sin = angles(len(x), pairs, x.dtype, str(x.device))
    before = x.clone()

    with poisoned_memory():
        rotated = apply_rope(x, cos, sin, interleaved=interleaved)

    exact = (each.double().cpu() for each in (x, cos, sin))
    expected = apply_rope_reference(*exact, interleaved=interleaved)
    assert rotated.dtype == x.dtype
    assert rotated.is_contiguous()
    torch.testing.assert_close(rotated.double().cpu(), expected, rtol=0, atol=TOLERANCES[x.dtype])
    assert torch.equal(rotated[..., 2 * pairs :], x[..., 2 * pairs :])
    assert torch.equal(x, before)


@interpreted_only
@settings(max_examples=25)
@given(
    num_tokens=st.integers(0, 4),
    num_heads=st.integers(1, 12),
    pairs=st.integers(1, 70),
    rest=st.integers(0, 40),
    interleaved=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_heads_of_any_shape_agree_with_torch(
    num_tokens: int, num_heads: int, pairs: int, rest: int, interleaved: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(pairs)
    x = torch.randn(num_tokens, num_heads, 2 * pairs + rest).clamp_(-3, 3).to(dtype)
    rotate_and_check(x, pairs, interleaved=interleaved)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "dim", "pairs"),
    [(40, 128, 64), (9, 64, 32), (3, 80, 40), (2, 96, 24), (5, 256, 128)],
)
def test_heads_in_a_projection_of_models_agree_with_torch(
    device: str, dtype: torch.dtype, interleaved: bool, num_heads: int, dim: int, pairs: int
) -> None:
    torch.manual_seed(0)
    fused = torch.randn(3, num_heads + 2, dim, device=device).clamp_(-3, 3).to(dtype)
    rotate_and_check(fused[:, 1:-1], pairs, interleaved=interleaved)
