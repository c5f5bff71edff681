"""Parameters of a step program's norms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from remora.kernels.cpu.structs import NormStruct, struct_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NormWeights:
    """Weights of an RMS norm or, if centered, of a layer norm.

    weight:       [size] float32
    bias:         [size] float32 or None
    span:         consecutive elements that are normalised together; None = all
    is_centered:  whether the mean is subtracted first
    """

    weight: Tensor
    epsilon: float
    bias: Tensor | None = None
    span: int | None = None
    is_centered: bool = False

    def struct(self) -> NormStruct:
        """Return the library's view of it."""
        size = len(self.weight)
        return struct_of(NormStruct, self, size=size, span=self.span or size)
