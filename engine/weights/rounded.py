"""Rounds matrices of a checkpoint's layers to 8 bits when they are read.

Each output has a scale, except that float8 experts have one for each block of 128 x 128, as their
kernels need it. Weights that are quantised already stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.protocols import (
    QuantisedSource,
    QuantisedTensor,
    WeightSource,
    quantised_tensors,
)
from remora.kernels.quantised.quant_formats import BLOCK, MAX_FP8, MIN_AMAX
from remora.kernels.quantised.quantise import quantise_int8_reference
from remora.kernels.quantised.weight_kinds import Float8Weight, IntWeight, WeightKind

Rounding = Literal["int8", "fp8"]
LAYERS, EXPERTS = "model.layers.", ".mlp.experts."


class RoundedWeights:
    """QuantisedSource over a WeightSource, in which the matrices of layers count as quantised."""

    def __init__(self, source: WeightSource, rounding: Rounding) -> None:
        self.label = source.label
        self._source, self._rounding = source, rounding
        self._stored = quantised_tensors(source)
        self._matrices = {
            name: QuantisedTensor(label=rounding, shape=shape)
            for name, shape in source.shapes().items()
            if len(shape) == 2 and name.startswith(LAYERS) and name not in self._stored
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return self._source.shapes()

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each of these tensors, not rounded."""
        yield from self._source.read(names)

    def quantised(self) -> Mapping[str, QuantisedTensor]:
        """Return the matrices of layers, and what is quantised already."""
        return {**self._stored, **self._matrices}

    def kinds(self, names: Collection[str]) -> Iterator[tuple[str, WeightKind]]:
        """Yield these weights as they are stored, or rounded."""
        if isinstance(self._source, QuantisedSource):
            yield from self._source.kinds(self._stored.keys() & names)
        for name, plain in self._source.read(self._matrices.keys() & names):
            yield name, self._rounded(name, plain)

    def _rounded(self, name: str, plain: Tensor) -> WeightKind:
        if self._rounding == "fp8":
            is_expert = EXPERTS in name
            return _rounded_fp8(plain, (BLOCK, BLOCK) if is_expert else (1, plain.shape[1]))
        values, scales = quantise_int8_reference(plain)
        groups = torch.zeros(plain.shape[1], dtype=torch.int64)
        return IntWeight(codes=values, scales=scales[:, None], groups=groups, bits=8)


def _rounded_fp8(plain: Tensor, block: tuple[int, int]) -> Float8Weight:
    """Round so that the largest number of a block is the largest of the format."""
    (outputs, inputs), (high, wide) = plain.shape, block
    padded = F.pad(plain.float(), (0, -inputs % wide, 0, -outputs % high))
    blocks = padded.view(len(padded) // high, high, -1, wide)
    scales = blocks.abs().amax(dim=(1, 3)).clamp_min(MIN_AMAX) / MAX_FP8
    values = (blocks / scales[:, None, :, None]).clamp(-MAX_FP8, MAX_FP8)
    values = values.view(padded.shape)[:outputs, :inputs]
    return Float8Weight(values=values.to(torch.float8_e4m3fn), scales=scales, block=block)
