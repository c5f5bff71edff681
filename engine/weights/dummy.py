"""Random weights, for tests and for measuring without a checkpoint.

Each tensor's values follow from its name alone, so they are the same on every machine, however
the model fuses or splits its layers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

STD = 0.02  # small enough for finite outputs at any depth that is in use


class DummyWeights:
    """WeightSource that makes up tensors of the wanted shapes."""

    def __init__(self, wanted: Mapping[str, Tensor]) -> None:
        self.label = "random weights"
        self._shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes that were asked for."""
        return self._shapes

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield normal values; norm weights lie around 1."""
        for name, shape in self._shapes.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(shape, generator=generator).mul_(STD)
            yield name, values.add_(1.0) if name.endswith("norm.weight") else values
