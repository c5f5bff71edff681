"""Formats of quantised weights and rows: dataclasses and constants that all kernels share.

Legend: E experts, I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

GROUP = 128  # inputs that share a scale in `quantise_fp8_groups`
BLOCK = GROUP  # outputs and inputs that share a scale in `Fp8BlockWeight`
MAX_HALF = 64  # most inputs of half a run in `Int4Weight`
MAX_INT8, MAX_FP8 = 127.0, 448.0  # largest values; float8_e4m3fn has no infinity
MIN_AMAX = 1e-10  # lower bound of a row's largest magnitude, so that a scale is never zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    """A weight with one scale for each output.

    values:  [O, I] int8
    scales:  [O] float32
    """

    values: Tensor
    scales: Tensor

    def dequantised(self) -> Tensor:
        """Return the weight [O, I] in float32."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """A weight with one scale for each output; a per-tensor scale is repeated.

    values:       [O, I] float8_e4m3fn
    scales:       [O] float32
    input_scale:  [1] float32, static scale of all input rows; None = one scale for each row
    """

    values: Tensor
    scales: Tensor
    input_scale: Tensor | None = None

    def dequantised(self) -> Tensor:
        """Return the weight [O, I] in float32."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8BlockWeight:
    """A weight, or a stack of E experts' weights, with a scale for each block of 128 x 128.

    values:  [O, I] or [E, O, I] float8_e4m3fn
    scales:  [blocks of O, blocks of I] or [E, ...] float32; the last blocks may be smaller
    """

    values: Tensor
    scales: Tensor

    def dequantised(self) -> Tensor:
        """Return the weight in float32, in the shape of `values`."""
        outputs, inputs = self.values.shape[-2:]
        scales = self.scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        return self.values.float() * scales[..., :outputs, :inputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """A 4-bit weight with a scale and a zero point for each group of inputs.

    values:  [O, bytes] uint8, made by `int4.pack_int4`. Inputs form runs of two halves of
             h = min(64, group_size) each; byte j of a run holds input j in its low bits and input
             h + j in its high bits, so a kernel splits a block of bytes into two blocks of
             consecutive inputs.
    scales:  [G, O] of any float type
    zeros:   [G, O] uint8
    inputs:  I; the last run is padded
    order:   [I] int64, the input that each stored one is; None = they are in order
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    inputs: int
    group_size: int
    order: Tensor | None = None

    @property
    def half(self) -> int:
        """The inputs of half a run."""
        return min(MAX_HALF, self.group_size)

    def dequantised(self) -> Tensor:
        """Return the weight [O, I] in float32."""
        runs = self.values.view(len(self.values), -1, self.half)
        values = torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)[:, : self.inputs]
        group = torch.arange(self.inputs, device=values.device) // self.group_size
        plain = (values.float() - self.zeros[group].T.float()) * self.scales[group].T.float()
        return plain if self.order is None else plain[:, self.order.argsort()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8GroupWeight:
    """An 8-bit weight with a scale and a zero point for each group of inputs.

    values:  [O, I] uint8
    scales:  [G, O] of any float type
    zeros:   [G, O] uint8
    group_size:  32, 64 or a multiple of 128; the last group may be smaller
    order:   [I] int64, the input that each stored one is; None = they are in order
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    order: Tensor | None = None

    def dequantised(self) -> Tensor:
        """Return the weight [O, I] in float32."""
        group = torch.arange(self.values.shape[1], device=self.values.device) // self.group_size
        plain = self.values.float() - self.zeros[group].T.float()
        plain *= self.scales[group].T.float()
        return plain if self.order is None else plain[:, self.order.argsort()]


QuantisedWeight = Int8Weight | Fp8Weight | Fp8BlockWeight | Int4Weight | Int8GroupWeight


def tensors_of(weight: QuantisedWeight) -> dict[str, Tensor]:
    """Return a weight's tensors by their names."""
    named = {each.name: getattr(weight, each.name) for each in fields(weight)}
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def moved(weight: QuantisedWeight, device: str) -> QuantisedWeight:
    """Return the weight on a device."""
    tensors = {name: tensor.to(device) for name, tensor in tensors_of(weight).items()}
    return replace(weight, **tensors)  # type: ignore[arg-type]


def num_bytes(weight: QuantisedWeight) -> int:
    """Return the bytes of a weight's tensors."""
    return sum(tensor.nbytes for tensor in tensors_of(weight).values())
