"""Kinds of quantised weights, each with its exact dequantisation and product in torch.

A kind knows numbers, not files: the readers of checkpoint formats make kinds, and kernels compute
with them. `dequantised` works on a bounded number of weights at a time, so that no copy in float32
of a whole tensor exists. Constructors raise ValueError for tensors that do not fit together.

Legend: E leading dimensions (experts), O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

AT_ONCE = 1 << 22  # weights that are dequantised at a time
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class WeightKind(ABC):
    """A quantised weight [*E, O, I]."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape [*E, O, I]."""

    @abstractmethod
    def rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last) of the weight as [*E * O, I], in float32."""

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight; products are made in float32 and rounded once to `dtype`."""
        inputs, total = self.shape[-1], math.prod(self.shape[:-1])
        plain = torch.empty(total, inputs, dtype=dtype)
        step = max(1, AT_ONCE // max(inputs, 1))
        for first in range(0, total, step):
            last = min(first + step, total)
            plain[first:last] = self.rows(first, last)
        return plain.view(self.shape)

    def product(self, inputs: Tensor) -> Tensor:
        """Multiply rows [R, I] by a weight [O, I]: the float32 reference of all kernels."""
        return F.linear(inputs.float(), self.dequantised())


@dataclass(frozen=True, slots=True, kw_only=True)
class IntWeight(WeightKind):
    """Integers with a scale, and maybe a zero point, for each output and group of inputs.

    codes:   [O, I] uint8 or int8, one to a byte whatever their number of bits
    scales:  [O, G], of any float type
    groups:  [I] int64, the group of each input
    zeros:   [O, G] integers that stand for 0; None = 0
    bits:    of a code
    """

    codes: Tensor
    scales: Tensor
    groups: Tensor
    zeros: Tensor | None = None
    bits: int

    def __post_init__(self) -> None:
        """Raise ValueError unless the tensors fit together."""
        _check_codes(self.codes, torch.uint8, torch.int8)
        _check_scales(self.scales, (self.codes.shape[0], self.scales.shape[-1]))
        if self.zeros is not None and self.zeros.shape != self.scales.shape:
            raise ValueError(
                f"zeros are {list(self.zeros.shape)}, scales {list(self.scales.shape)}"
            )
        if self.groups.shape != (self.codes.shape[1],):
            raise ValueError(
                f"groups are {list(self.groups.shape)} of {self.codes.shape[1]} inputs"
            )
        if self.groups.numel() and not (
            self.groups.min() >= 0 and self.groups.max() < self.scales.shape[1]
        ):
            raise ValueError(f"a group is outside of the {self.scales.shape[1]} that have scales")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [O, I]."""
        return tuple(self.codes.shape)

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last)."""
        values = self.codes[first:last].float()
        if self.zeros is not None:
            values -= self.zeros[first:last].float()[:, self.groups]
        return values * self.scales[first:last].float()[:, self.groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Weight(WeightKind):
    """8-bit floats with a scale for each block of outputs and inputs.

    values:  [*E, O, I] float8_e4m3fn or float8_e5m2
    scales:  [*E, blocks of O, blocks of I]; the last blocks may be smaller
    block:   outputs and inputs of a block: (O, I) per tensor, (1, I) per output
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        """Raise ValueError unless the tensors fit together."""
        _check_codes(self.values, *FP8_DTYPES)
        *leading, outputs, inputs = self.values.shape
        high, wide = self.block
        _check_scales(self.scales, (*leading, -(-outputs // high), -(-inputs // wide)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [*E, O, I]."""
        return tuple(self.values.shape)

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last)."""
        outputs, inputs = self.values.shape[-2:]
        index = torch.arange(first, last)
        high, wide = self.block
        blocks = index // outputs * self.scales.shape[-2] + index % outputs // high
        scales = self.scales.flatten(0, -2)[blocks].float()
        values = self.values.flatten(0, -2)[first:last].float()
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(wide, 1)[:, :inputs]
        return values * scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Float4Weight(WeightKind):
    """4-bit floats (e2m1), two in a byte, with a scale for each group of inputs.

    values:  [*E, O, I / 2] uint8, the earlier input in the low bits
    scales:  [*E, O, G] float32; powers of two in MXFP4
    """

    values: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        """Raise ValueError unless the tensors fit together."""
        _check_codes(self.values, torch.uint8)
        groups = max(self.scales.shape[-1], 1)
        _check_scales(self.scales, (*self.values.shape[:-1], groups))
        if self.shape[-1] % groups:
            raise ValueError(f"{self.shape[-1]} inputs are not divided by {groups} groups")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [*E, O, I]."""
        return (*self.values.shape[:-1], self.values.shape[-1] * 2)

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last)."""
        table = torch.tensor((*E2M1, *(-value for value in E2M1)))
        pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=1)
        values = pairs[self.values.flatten(0, -2)[first:last].int()].flatten(1)
        scales = self.scales.flatten(0, -2)[first:last]
        grouped = values.view(len(values), scales.shape[1], -1)
        return (grouped * scales[..., None]).flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWeight(WeightKind):
    """Indices into a table of 16 numbers, with a scale for each run of the flattened weight.

    values:  [O * I / 2] uint8, the earlier number in the high bits
    table:   [16] float32
    scales:  [runs] float32
    run:     numbers that share a scale
    size:    O and I
    """

    values: Tensor
    table: Tensor
    scales: Tensor
    run: int
    size: tuple[int, int]

    def __post_init__(self) -> None:
        """Raise ValueError unless the tensors fit together."""
        _check_codes(self.values, torch.uint8)
        number = math.prod(self.size)
        if self.values.numel() != -(-number // 2) or self.table.shape != (16,):
            raise ValueError(f"{self.values.numel()} bytes do not hold {list(self.size)} numbers")
        _check_scales(self.scales, (-(-number // self.run),))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [O, I]."""
        return self.size

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last)."""
        inputs = self.size[1]
        places = torch.arange(first * inputs, last * inputs)
        codes = self.values[places // 2] >> (1 - places % 2) * 4 & 15
        return (self.table[codes.int()] * self.scales[places // self.run]).view(-1, inputs)


def _check_codes(codes: Tensor, *dtypes: torch.dtype) -> None:
    if codes.dtype not in dtypes:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(codes.dtype).removeprefix("torch.")
        raise ValueError(f"it is stored as {found}; expected {known}")


def _check_scales(scales: Tensor, shape: tuple[int, ...]) -> None:
    if scales.shape != shape:
        raise ValueError(f"scales are {list(scales.shape)}; expected {list(shape)}")
    if not scales.is_floating_point():
        raise ValueError(f"scales are stored as {str(scales.dtype).removeprefix('torch.')}")
    if not scales.float().isfinite().all():
        raise ValueError("a scale is infinite or not a number")
