"""Kinds of quantised weights, each with its exact dequantisation and product in torch.

A kind knows numbers, not files: the readers of checkpoint formats make kinds, and kernels compute
with them. `dequantised` works on a bounded number of weights at a time, so that no copy in float32
of a whole tensor exists. Constructors raise ValueError for tensors that do not fit together.

Legend: E leading dimensions (experts), O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

AT_ONCE = 1 << 22  # weights that are dequantised at a time
_CHECKED_AT_ONCE = 2**19  # groups of 8 bytes
_EACH_BYTE = 0x0101010101010101
_HIGHEST_BITS = 0x80 * _EACH_BYTE - 2**64  # as a signed number
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class WeightKind(ABC):
    """A quantised weight [*E, O, I]."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape [*E, O, I]."""

    @property
    def num_bytes(self) -> int:
        """The bytes of codes and scales, packed without gaps."""
        held = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return sum(part.nbytes for part in held if isinstance(part, Tensor))

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

    @abstractmethod
    def select(self, rows: Tensor) -> WeightKind:
        """Return the weight [R, I] of some rows.

        rows:  [R] int64, indices into the rows of all leading dimensions
        """

    @abstractmethod
    def joined(self, others: Sequence[Self]) -> Self | None:
        """Return the weight with the rows of others below its own; None = they cannot share one.

        others:  of the same class and number of inputs
        """

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
        if self.codes.dtype == torch.int8 and self.bits < 8:
            self._check_range("numbers", self.codes)
        _check_scales(self.scales, (self.codes.shape[0], self.scales.shape[-1]))
        if self.zeros is not None and self.zeros.shape != self.scales.shape:
            raise ValueError(
                f"zeros are {list(self.zeros.shape)}, scales {list(self.scales.shape)}"
            )
        if self.zeros is not None and self.zeros.is_floating_point():
            raise ValueError(f"zeros are {str(self.zeros.dtype).removeprefix('torch.')}s")
        if self.zeros is not None:
            self._check_range("zeros", self.zeros)
        if self.groups.shape != (self.codes.shape[1],):
            raise ValueError(
                f"groups are {list(self.groups.shape)} of {self.codes.shape[1]} inputs"
            )
        if self.groups.numel() and not (
            self.groups.min() >= 0 and self.groups.max() < self.scales.shape[1]
        ):
            raise ValueError(f"a group is outside of the {self.scales.shape[1]} that have scales")

    def _check_range(self, what: str, values: Tensor) -> None:
        """Raise ValueError unless integers lie in the range of the codes."""
        if not values.numel():
            return
        low = -(1 << self.bits - 1) if self.codes.dtype == torch.int8 else 0
        high = low + (1 << self.bits) - 1
        least, most = (int(edge) for edge in values.aminmax())
        if least < low or most > high:
            raise ValueError(
                f"{what} lie in [{least}, {most}]; those of {self.bits} bits lie in [{low}, {high}]"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [O, I]."""
        return tuple(self.codes.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of codes and zeros of `bits` bits, and of scales."""
        zeros = 0 if self.zeros is None else self.zeros.numel()
        return (self.codes.numel() + zeros) * self.bits // 8 + self.scales.nbytes

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last)."""
        values = self.codes[first:last].float()
        if self.zeros is not None:
            values -= self.zeros[first:last].float()[:, self.groups]
        return values * self.scales[first:last].float()[:, self.groups]

    def select(self, rows: Tensor) -> IntWeight:
        """Return the weight of some rows."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros)

    def joined(self, others: Sequence[IntWeight]) -> IntWeight | None:
        """Join weights of the same groups, both with zeros or both without."""
        has_zeros = self.zeros is not None
        for other in others:
            is_like = (other.bits, other.codes.dtype, other.scales.dtype) == (
                self.bits,
                self.codes.dtype,
                self.scales.dtype,
            )
            is_like = is_like and (other.zeros is not None) == has_zeros
            if not is_like or not torch.equal(other.groups, self.groups):
                return None
        every = (self, *others)
        zeros = [one.zeros for one in every if one.zeros is not None]
        return replace(
            self,
            codes=torch.cat([one.codes for one in every]),
            scales=torch.cat([one.scales for one in every]),
            zeros=torch.cat(zeros) if has_zeros else None,
        )


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
        _check_finite(self.values)
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

    def select(self, rows: Tensor) -> Float8Weight:
        """Return the weight of some rows, each with scales of its own."""
        outputs, blocks = self.values.shape[-2], self.scales.shape[-2]
        places = rows // outputs * blocks + rows % outputs // self.block[0]
        return Float8Weight(
            values=self.values.flatten(0, -2).view(torch.uint8)[rows].view(self.values.dtype),
            scales=self.scales.flatten(0, -2)[places],
            block=(1, self.block[1]),
        )

    def joined(self, others: Sequence[Float8Weight]) -> Float8Weight | None:
        """Join weights of blocks of the same width; each row has scales of its own then."""
        every = (self, *others)
        if len({(one.values.dtype, one.scales.dtype, one.block[1]) for one in every}) > 1:
            return None
        rows = [one.select(torch.arange(math.prod(one.shape[:-1]))) for one in every]
        values = torch.cat([one.values.view(torch.uint8) for one in rows])
        return Float8Weight(
            values=values.view(self.values.dtype),
            scales=torch.cat([one.scales for one in rows]),
            block=rows[0].block,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Float4Weight(WeightKind):
    """4-bit floats (e2m1), two in a byte, with a scale for each group of inputs.

    values:   [*E, O, I / 2] uint8, the earlier input in the low bits
    scales:   [*E, O, G] of any float type; float8_e8m0fnu in MXFP4, float8_e4m3fn in NVFP4
    factors:  [*E, O] float32, multiplied with the scales; None = 1
    """

    values: Tensor
    scales: Tensor
    factors: Tensor | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless the tensors fit together."""
        _check_codes(self.values, torch.uint8)
        groups = max(self.scales.shape[-1], 1)
        _check_scales(self.scales, (*self.values.shape[:-1], groups))
        if self.factors is not None:
            _check_scales(self.factors, tuple(self.values.shape[:-1]))
        if self.shape[-1] % groups:
            raise ValueError(f"{self.shape[-1]} inputs are not divided by {groups} groups")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [*E, O, I]."""
        return (*self.values.shape[:-1], self.values.shape[-1] * 2)

    @property
    def num_bytes(self) -> int:
        """The bytes of values and scales; a checkpoint has one factor for a tensor."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def whole_scales(self) -> Tensor:
        """The scales times their factors, [*E, O, G] float32."""
        scales = self.scales.float()
        return scales if self.factors is None else scales * self.factors[..., None]

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last)."""
        some = self.select(torch.arange(first, last))
        table = torch.tensor((*E2M1, *(-value for value in E2M1)))
        pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=1)
        values = pairs[some.values.int()].flatten(1)
        grouped = values.view(len(values), some.scales.shape[1], -1)
        return (grouped * some.whole_scales[..., None]).flatten(1)

    def select(self, rows: Tensor) -> Float4Weight:
        """Return the weight of some rows."""
        return Float4Weight(
            values=self.values.flatten(0, -2)[rows],
            scales=self.scales.flatten(0, -2)[rows],
            factors=None if self.factors is None else self.factors.flatten()[rows],
        )

    def joined(self, others: Sequence[Float4Weight]) -> Float4Weight | None:
        """Join weights of the same groups and types of scales, with factors or without."""
        every = (self, *others)
        likes = {(one.scales.shape[-1], one.scales.dtype, one.factors is None) for one in every}
        if len(likes) > 1:
            return None
        factors = [one.factors.flatten() for one in every if one.factors is not None]
        return Float4Weight(
            values=torch.cat([one.values.flatten(0, -2) for one in every]),
            scales=torch.cat([one.scales.flatten(0, -2) for one in every]),
            factors=torch.cat(factors) if factors else None,
        )


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
        if not self.table.isfinite().all():
            raise ValueError("a number of its table is infinite or not a number")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [O, I]."""
        return self.size

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last)."""
        places = torch.arange(first * self.size[1], last * self.size[1])
        return (self.table[self._codes(places)] * self.scales[places // self.run]).view(
            -1, self.size[1]
        )

    def select(self, rows: Tensor) -> TableWeight:
        """Return the weight of some rows, in runs that begin anew in each row."""
        inputs = self.size[1]
        places = (rows[:, None] * inputs + torch.arange(inputs)).flatten()
        codes = torch.nn.functional.pad(self._codes(places), (0, len(places) % 2))
        run = math.gcd(inputs, self.run)
        return TableWeight(
            values=(codes[0::2] << 4 | codes[1::2]).to(torch.uint8),
            table=self.table,
            scales=self.scales[places[::run] // self.run],
            run=run,
            size=(len(rows), inputs),
        )

    def joined(self, others: Sequence[TableWeight]) -> TableWeight | None:
        """Join weights of whole runs in each row and the same table."""
        every, inputs = (self, *others), self.size[1]
        if inputs % 2 or inputs % self.run:
            return None
        if any(one.run != self.run or not torch.equal(one.table, self.table) for one in others):
            return None
        return TableWeight(
            values=torch.cat([one.values for one in every]),
            table=self.table,
            scales=torch.cat([one.scales for one in every]),
            run=self.run,
            size=(sum(one.size[0] for one in every), inputs),
        )

    def _codes(self, places: Tensor) -> Tensor:
        """Return the codes [places] int32 at places of the flattened weight."""
        return (self.values[places // 2] >> (1 - places % 2) * 4 & 15).int()


def join(kinds: Sequence[WeightKind]) -> WeightKind | None:
    """Return the weight [O, I] with the rows of all; None = they cannot share one.

    kinds:  weights [O, I] of the same number of inputs
    """
    first, *others = kinds
    if any(type(other) is not type(first) for other in others):
        return None
    return first.joined(others) if others else first


def _check_codes(codes: Tensor, *dtypes: torch.dtype) -> None:
    if codes.dtype not in dtypes:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(codes.dtype).removeprefix("torch.")
        raise ValueError(f"it is stored as {found}; expected {known}")


def _check_finite(values: Tensor) -> None:
    """Raise ValueError if a number of 8 bits is infinite or not a number; reads each byte once."""
    bits = values.view(torch.uint8).flatten()
    # Such numbers have all bits of e4m3 but the sign, or of e5m2's exponent: adding the lowest of
    # them carries into the highest bit of the byte. Eight bytes are added at a time.
    mask, lowest = (0x7F, 0x01) if values.dtype is torch.float8_e4m3fn else (0x7C, 0x04)
    whole = len(bits) // 8 * 8 if bits.storage_offset() % 8 == 0 else 0
    words = bits[:whole].view(torch.int64) if whole else torch.empty(0, dtype=torch.int64)
    for part in torch.split(words, _CHECKED_AT_ONCE):
        if ((part & mask * _EACH_BYTE) + lowest * _EACH_BYTE & _HIGHEST_BITS).any():
            raise ValueError("a weight is infinite or not a number")
    if bool((bits[whole:] & mask == mask).any()):
        raise ValueError("a weight is infinite or not a number")


def _check_scales(scales: Tensor, shape: tuple[int, ...]) -> None:
    if scales.shape != shape:
        raise ValueError(f"scales are {list(scales.shape)}; expected {list(shape)}")
    if not scales.is_floating_point():
        raise ValueError(f"scales are stored as {str(scales.dtype).removeprefix('torch.')}")
    if not scales.float().isfinite().all():
        raise ValueError("a scale is infinite or not a number")
