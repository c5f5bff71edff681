"""Random weights, for tests and for measuring without a checkpoint.

Each tensor's values follow from its name and the kind of device, so they are the same on every
machine, however the model fuses or splits its layers, between ranks too. They are made where the
weights belong: billions of them take a CPU minutes.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

STD = 0.02  # small enough for finite outputs at any depth that is in use


class DummyWeights:
    """WeightSource that makes up tensors of the wanted shapes."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, device: str = "cpu") -> None:
        self.label = "random weights"
        self._shapes = shapes
        self._device = device

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes that were asked for."""
        return self._shapes

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield normal values; norm weights lie around 1."""
        for name in names:
            shape = self._shapes[name]
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(shape, generator=generator, device=self._device).mul_(STD)
            yield name, values.add_(1.0) if name.endswith("norm.weight") else values
