"""Gated activations by kernels against torch in float64, from the same rounded inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.activation import (
    gelu_and_mul,
    gelu_and_mul_reference,
    silu_and_mul,
    silu_and_mul_reference,
)
from tests.kernels.gpu.devices import interpreted_only, poisoned_memory

# Twice half a unit in the last place: rounded before the product and after it. Of float32 the
# exponential adds a few more.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
GATES = ["silu", "gelu none", "gelu tanh"]


def check(gate_up: Tensor, gate: str) -> None:
    exact = gate_up.double().cpu()
    with poisoned_memory():
        if gate == "silu":
            activated = silu_and_mul(gate_up)
        else:
            activated = gelu_and_mul(gate_up, "none" if gate == "gelu none" else "tanh")
    if gate == "silu":
        expected = silu_and_mul_reference(exact)
    else:
        expected = gelu_and_mul_reference(exact, "none" if gate == "gelu none" else "tanh")

    tolerance = TOLERANCES[gate_up.dtype]
    assert activated.dtype == gate_up.dtype
    # 1 + erf cancels below zero, and float16 has no small numbers.
    torch.testing.assert_close(
        activated.double().cpu(), expected, rtol=tolerance, atol=max(2e-6, 0.01 * tolerance)
    )


@interpreted_only
@settings(max_examples=25)
@given(
    num_tokens=st.integers(0, 4),
    dim=st.integers(1, 1100),
    dtype=st.sampled_from(list(TOLERANCES)),
    gate=st.sampled_from(GATES),
)
def test_tokens_of_any_number_and_width_agree_with_torch(
    num_tokens: int, dim: int, dtype: torch.dtype, gate: str
) -> None:
    torch.manual_seed(dim)
    check((2 * torch.randn(num_tokens, 2 * dim)).to(dtype), gate)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_gates_of_any_size_agree_with_torch(device: str, dtype: torch.dtype, gate: str) -> None:
    gates = torch.tensor([-100.0, -20.0, -5.0, -0.1, -0.0, 0.0, 0.1, 5.0, 20.0, 100.0])
    up = torch.linspace(-2, 2, len(gates))

    check(torch.cat((gates, up)).to(device, dtype)[None], gate)


def test_rows_may_lie_in_a_wider_tensor(device: str) -> None:
    torch.manual_seed(0)
    check(torch.randn(3, 100, device=device)[:, 7:95], "silu")


def test_a_gate_that_is_not_a_number_shows(device: str) -> None:
    gate_up = torch.tensor([[float("nan"), 1.0, 1.0, 1.0]], device=device)

    assert silu_and_mul(gate_up).isnan().tolist() == [[True, False]]
