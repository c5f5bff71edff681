import pytest
import torch

from remora.kernels.activation import silu_and_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_comes_first_and_passes_through_silu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(3, 10).to(dtype), torch.randn(3, 10).to(dtype)

    activated = silu_and_mul(torch.cat((gate, up), dim=1))

    expected = gate.float() * torch.sigmoid(gate.float()) * up.float()
    # Two roundings of the dtype.
    torch.testing.assert_close(activated, expected.to(dtype), rtol=0.02, atol=1e-6)
