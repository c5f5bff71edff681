"""Dequantises checkpoints while they are read; the model computes in its own dtype.

Two formats are recognised by their tensors' names: MXFP4 (`*_blocks` with `*_scales`: two 4-bit
numbers in a byte, an exponent for each 32; GPT-OSS), and float8 with a scale for each block of
128 x 128 (`*.weight` with `*.weight_scale_inv`; DeepSeek-V3). Opens no files;
`models/architectures.py` checks that config.json names one of the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from remora.engine.protocols import WeightSource
from remora.kernels.quant_formats import Fp8BlockWeight

BLOCKS, SCALES, INVERSE = "_blocks", "_scales", "_scale_inv"
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT_BIAS = 127


def dequantised(source: WeightSource, dtype: torch.dtype) -> WeightSource:
    """Return a source of dequantised tensors: `source` itself if it is not quantised."""
    found = DequantisedWeights(source, dtype)
    return found if found.shapes().keys() != source.shapes().keys() else source


class DequantisedWeights:
    """WeightSource that dequantises the tensors of another one."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self.label = source.label
        self._source = source
        self._dtype = dtype
        stored = source.shapes()
        self._packed = {
            name.removesuffix(BLOCKS)
            for name in stored
            if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in stored
        }
        self._scaled = {
            name.removesuffix(INVERSE)
            for name in stored
            if name.endswith(INVERSE) and name.removesuffix(INVERSE) in stored
        }
        used = {name + end for name in self._packed for end in (BLOCKS, SCALES)}
        used |= {name + INVERSE for name in self._scaled}
        self._shapes = {name: shape for name, shape in stored.items() if name not in used}
        for name in self._packed:
            number, outputs, groups, half = stored[name + BLOCKS]
            self._shapes[name] = (number, groups * half * 2, outputs)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, dequantised."""
        return self._shapes

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each of these tensors, dequantised one at a time."""
        wanted = set(names)
        scaled = wanted & self._scaled
        scales = dict(self._source.read({name + INVERSE for name in scaled})) if scaled else {}
        for name, tensor in self._source.read(wanted - self._packed):
            if name in scaled:
                weight = Fp8BlockWeight(values=tensor, scales=scales[name + INVERSE].float())
                tensor = weight.dequantised().to(self._dtype)
            yield name, tensor
        for name in sorted(wanted & self._packed):
            parts = dict(self._source.read({name + BLOCKS, name + SCALES}))
            yield name, unpack_mxfp4(parts[name + BLOCKS], parts[name + SCALES], self._dtype)


def unpack_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack weights of experts.

    blocks:  [E, outputs, groups, 16] uint8, the first number of each pair in the low bits
    scales:  [E, outputs, groups] uint8, exponents
    Returns [E, inputs, outputs], a view of [E, outputs, inputs].
    """
    number, outputs, groups, half = blocks.shape
    values = torch.tensor((*FP4, *(-value for value in FP4)), dtype=dtype)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)
    plain = torch.empty(number, outputs, groups, half * 2, dtype=dtype)
    for expert in range(number):
        numbers = pairs[blocks[expert].int()].flatten(2)
        factors = torch.exp2(scales[expert].float() - EXPONENT_BIAS)
        plain[expert] = numbers * factors.to(dtype).unsqueeze(2)
    return plain.view(number, outputs, -1).transpose(1, 2)
