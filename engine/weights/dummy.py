"""Random weights, for tests and for benchmarks without a checkpoint.

A tensor's values depend on its name and the device type only, so they are the same on every machine
and rank, however the model fuses or splits its layers. They are generated on the target device:
billions of values take minutes on a CPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

STD = 0.02  # small enough for finite outputs at any depth in use


class DummyWeights:
    """WeightSource of random tensors of the given shapes."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, device: str = "cpu") -> None:
        self.label = "random weights"
        self._shapes = shapes
        self._device = device

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the given shapes."""
        return self._shapes

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield normally distributed values that bfloat16 holds; norm weights are around 1."""
        for name in names:
            shape = self._shapes[name]
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(shape, generator=generator, device=self._device).mul_(STD)
            if name.endswith("norm.weight"):
                values += 1.0
            yield name, values.bfloat16()
