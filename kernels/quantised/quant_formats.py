"""Formats of quantised weights and rows: dataclasses and constants that all kernels share.

Legend: E experts, I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from remora.kernels.quantised.weight_kinds import E2M1

GROUP = 128  # inputs that share a scale in `quantise_fp8_groups`
BLOCK = GROUP  # outputs and inputs that share a scale in `Fp8BlockWeight`
MAX_HALF = 64  # most inputs of half a run, see `in_runs`
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
    """A 4-bit weight, or a stack of E experts' weights, with scales and zero points of groups.

    values:  [*E, O, bytes] uint8, made by `int4.pack_int4`: nibbles in the order of `in_runs`, with
             halves of min(64, group_size) inputs
    scales:  [*E, G, O] of any float type
    zeros:   [*E, G, O] uint8
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
        """Return the weight [*E, O, I] in float32."""
        codes = from_runs(self.values, self.half)[..., : self.inputs].float()
        return _plain(codes, self.scales, self.zeros, self.group_size, self.order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8GroupWeight:
    """An 8-bit weight, or a stack of E experts' weights, with scales and zero points of groups.

    values:  [*E, O, I] uint8
    scales:  [*E, G, O] of any float type
    zeros:   [*E, G, O] uint8
    group_size:  32, 64 or a multiple of 128; the last group may be smaller
    order:   [I] int64, the input that each stored one is; None = they are in order
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    order: Tensor | None = None

    @property
    def inputs(self) -> int:
        """The inputs I."""
        return self.values.shape[-1]

    @property
    def half(self) -> int:
        """The inputs that are multiplied at a time, which are of one group."""
        return min(MAX_HALF, self.group_size)

    def dequantised(self) -> Tensor:
        """Return the weight [*E, O, I] in float32."""
        return _plain(self.values.float(), self.scales, self.zeros, self.group_size, self.order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4GroupWeight:
    """A weight of 4-bit floats (e2m1), or a stack of E experts' weights, with scales of groups.

    values:   [*E, O, bytes] uint8, nibbles in the order of `in_runs` with halves of 64 inputs
    scales:   [*E, G, O] float8_e8m0fnu (MXFP4) or float8_e4m3fn (NVFP4)
    factors:  [*E, O] float32, multiplied with the scales of an output; None = 1
    inputs:   I; the last run is padded
    group_size: 16 or 32
    """

    values: Tensor
    scales: Tensor
    factors: Tensor | None
    inputs: int
    group_size: int

    order = None
    half = MAX_HALF

    def dequantised(self) -> Tensor:
        """Return the weight [*E, O, I] in float32."""
        codes = from_runs(self.values, self.half)[..., : self.inputs].int()
        values = torch.tensor(E2M1, device=codes.device)[codes & 7]
        values = torch.where(codes > 7, -values, values)
        scales = self.scales.float()
        if self.factors is not None:
            scales = scales * self.factors[..., None, :]
        return values * _of_inputs(scales, self.group_size, self.inputs)


GroupWeight = Int4Weight | Int8GroupWeight | Fp4GroupWeight
QuantisedWeight = Int8Weight | Fp8Weight | Fp8BlockWeight | GroupWeight
Weight = TypeVar("Weight", bound=QuantisedWeight)


def in_runs(codes: Tensor, half: int) -> Tensor:
    """Pack 4-bit codes [..., I] uint8 into bytes.

    Inputs form runs of two halves of `half` each; byte j of a run holds input j in its low bits and
    input half + j in its high bits, so a kernel splits a block of bytes into two blocks of
    consecutive inputs. The last run is padded with zeros.
    """
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % (2 * half)))
    low, high = padded.view(*codes.shape[:-1], -1, 2, half).unbind(-2)
    return (low | high << 4).flatten(-2).contiguous()


def from_runs(packed: Tensor, half: int) -> Tensor:
    """Return the codes of `in_runs`, with their padding."""
    runs = packed.view(*packed.shape[:-1], -1, half)
    return torch.stack((runs & 15, runs >> 4), dim=-2).flatten(-3)


def _plain(
    codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int, order: Tensor | None
) -> Tensor:
    """Return integers in groups [*E, O, I] in float32."""
    inputs = codes.shape[-1]
    plain = codes - _of_inputs(zeros.float(), group_size, inputs)
    plain *= _of_inputs(scales.float(), group_size, inputs)
    return plain if order is None else plain[..., order.argsort()]


def _of_inputs(of_groups: Tensor, group_size: int, inputs: int) -> Tensor:
    """Return values of groups [*E, G, O] for each input, [*E, O, I]."""
    group = torch.arange(inputs, device=of_groups.device) // group_size
    return of_groups[..., group, :].transpose(-1, -2)


def tensors_of(weight: QuantisedWeight) -> dict[str, Tensor]:
    """Return a weight's tensors by their names."""
    named = {each.name: getattr(weight, each.name) for each in fields(weight)}
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def with_tensors(weight: Weight, tensors: Iterator[Tensor]) -> Weight:
    """Return the weight with the next of `tensors` in the places of its own, in their order."""
    replaced = {name: next(tensors) for name in tensors_of(weight)}
    return replace(weight, **replaced)  # type: ignore[arg-type]


def moved(weight: QuantisedWeight, device: str) -> QuantisedWeight:
    """Return the weight on a device."""
    tensors = {name: tensor.to(device) for name, tensor in tensors_of(weight).items()}
    return replace(weight, **tensors)  # type: ignore[arg-type]


def num_bytes(weight: QuantisedWeight) -> int:
    """Return the bytes of a weight's tensors."""
    return sum(tensor.nbytes for tensor in tensors_of(weight).values())
