"""What a step program's norms know besides the rows that they read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from remora.kernels.cpu.structs import NormStruct


@dataclass(frozen=True, slots=True, kw_only=True)
class NormWeights:
    """A norm by the root mean square or, around the mean, by the standard deviation.

    weight:       [size] float32
    bias:         [size] float32 or None
    span:         elements that are normalised together, one after the other; None = all
    is_centered:  whether their mean is subtracted first
    """

    weight: Tensor
    epsilon: float
    bias: Tensor | None = None
    span: int | None = None
    is_centered: bool = False

    def struct(self) -> NormStruct:
        """Return what the library reads."""
        return NormStruct(
            weight=self.weight.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            size=len(self.weight),
            span=self.span or len(self.weight),
            is_centered=self.is_centered,
            epsilon=self.epsilon,
        )
