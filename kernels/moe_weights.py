"""Types of expert weights and biases that the CPU and GPU implementations of `moe` share.

Legend: E experts, O outputs, I inputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from remora.kernels.quantised.quant_formats import (
    BLOCK,
    Fp8BlockWeight,
    GroupWeight,
    tensors_of,
)

StackableWeight = Fp8BlockWeight | GroupWeight
ExpertWeight = Tensor | StackableWeight
Biases = tuple[Tensor | None, Tensor | None]  # of gate_up, of down
NO_BIASES: Biases = (None, None)


def values_of(weight: ExpertWeight) -> Tensor:
    """Return the tensor of a weight's elements."""
    return weight if isinstance(weight, Tensor) else weight.values


def shape_of(weight: ExpertWeight) -> tuple[int, int, int]:
    """Return E, O and I of a stack."""
    experts, outputs, inputs = values_of(weight).shape
    return experts, outputs, weight.inputs if isinstance(weight, GroupWeight) else inputs


def of_expert(weight: StackableWeight, expert: int) -> StackableWeight:
    """Return the weight [O, I] of an expert."""
    tensors = {name: tensor[expert] for name, tensor in tensors_of(weight).items()}
    return replace(weight, **tensors)  # type: ignore[arg-type]


def allocate_stack(
    like: StackableWeight, experts: int, outputs: int, device: str
) -> StackableWeight:
    """Allocate a stack [E, O, I] of weights like one [*, I] that has no order."""
    tensors = {}
    for name, tensor in tensors_of(like).items():
        axis, size = _outputs_of(like, name)
        shape = list(tensor.shape)
        shape[axis] = -(-outputs // size)
        tensors[name] = torch.empty(experts, *shape, dtype=tensor.dtype, device=device)
    return replace(like, **tensors)  # type: ignore[arg-type]


def write_rows(stack: StackableWeight, expert: int, first: int, weight: StackableWeight) -> None:
    """Write a weight to outputs of an expert, from `first` on, where float8 begins a block."""
    to = tensors_of(of_expert(stack, expert))
    for name, tensor in tensors_of(weight).items():
        axis, size = _outputs_of(weight, name)
        to[name].narrow(axis, first // size, tensor.shape[axis]).copy_(tensor)


def _outputs_of(weight: StackableWeight, name: str) -> tuple[int, int]:
    """Return the dimension of a tensor that counts outputs, and how many an element stands for."""
    if isinstance(weight, Fp8BlockWeight):
        return 0, BLOCK if name == "scales" else 1
    return (1, 1) if name in ("scales", "zeros") else (0, 1)
