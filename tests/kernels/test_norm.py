import pytest
import torch

from remora.kernels.norm import add_rms_norm, rms_norm


def naive_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normalised = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return normalised.to(x.dtype) * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (5, 96), (3, 4, 16)])
def test_norm_rounds_to_the_input_dtype_before_the_weight(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x, weight = (3 * torch.randn(shape)).to(dtype), torch.rand(shape[-1]).to(dtype)

    normed = rms_norm(x, weight, 1e-5)

    assert normed.dtype == dtype
    # One rounding step of the dtype: 1 / sqrt against rsqrt.
    torch.testing.assert_close(normed, naive_norm(x, weight, 1e-5))


def test_norm_of_large_half_precision_values_does_not_overflow() -> None:
    x = torch.full((1, 64), 3e4, dtype=torch.float16)

    normed = rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5)

    assert normed.tolist() == torch.ones(1, 64).tolist()


def test_norm_after_adding_returns_the_sum_in_the_memory_of_the_residual() -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.rand(32)
    total = x + residual

    normed, stream = add_rms_norm(x, residual, weight, 1e-6)

    assert stream is residual
    assert torch.equal(stream, total)
    torch.testing.assert_close(normed, naive_norm(total, weight, 1e-6))
