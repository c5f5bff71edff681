"""Types of expert weights and biases that the CPU and GPU implementations of `moe` share."""

from __future__ import annotations

from torch import Tensor

from remora.kernels.quantised.quant_formats import Fp8BlockWeight

ExpertWeight = Tensor | Fp8BlockWeight
Biases = tuple[Tensor | None, Tensor | None]  # of gate_up, of down
NO_BIASES: Biases = (None, None)


def values_of(weight: ExpertWeight) -> Tensor:
    """Return the tensor of a weight's elements."""
    return weight.values if isinstance(weight, Fp8BlockWeight) else weight
