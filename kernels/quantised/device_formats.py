"""Conversion of kinds of weights to the formats that `linear_quant` multiplies, number by number.

A kind with no such format is not converted: its owner dequantises it. Knows no device.

Legend: I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from remora.kernels.moe_weights import StackableWeight
from remora.kernels.quantised.int4 import pack_int4
from remora.kernels.quantised.quant_formats import (
    BLOCK,
    MAX_HALF,
    Fp4GroupWeight,
    Fp8BlockWeight,
    Fp8Weight,
    GroupWeight,
    Int4Weight,
    Int8GroupWeight,
    Int8Weight,
    QuantisedWeight,
    in_runs,
    tensors_of,
)
from remora.kernels.quantised.weight_kinds import (
    Float4Weight,
    Float8Weight,
    IntWeight,
    WeightKind,
)

INT4_BITS, MAX_ZERO = 4, 16
RUN = 2 * MAX_HALF  # larger groups are multiples of it
SMALL_GROUPS = (MAX_HALF, MAX_HALF // 2)
FP4_GROUPS = (32, 16)
FP4_SCALES = (torch.float8_e8m0fnu, torch.float8_e4m3fn)


def to_format(kind: WeightKind) -> QuantisedWeight | None:
    """Convert a weight [O, I]; None = no format holds exactly its numbers."""
    if isinstance(kind, IntWeight):
        return _to_int4(kind) if kind.bits <= INT4_BITS else _to_int8(kind) or _to_int8_groups(kind)
    if isinstance(kind, Float8Weight):
        return _to_fp8(kind)
    if isinstance(kind, Float4Weight):
        return _to_fp4(kind)
    return None


def to_stackable(kind: WeightKind | None) -> StackableWeight | None:
    """Convert an expert's weight [O, I] to what `moe` multiplies; None = no format holds it.

    Integers are in groups, whose inputs must be in order.
    """
    found: StackableWeight | None
    if isinstance(kind, IntWeight):
        found = _to_int4(kind) if kind.bits <= INT4_BITS else _to_int8_groups(kind)
    elif isinstance(kind, Float4Weight):
        found = _to_fp4(kind)
    else:
        found = to_fp8_blocks(kind)
    return None if isinstance(found, GroupWeight) and found.order is not None else found


def to_fp8_blocks(kind: WeightKind | None) -> Fp8BlockWeight | None:
    """Convert a weight [O, I] to blocks of 128 x 128; None = they do not hold its numbers."""
    if not isinstance(kind, Float8Weight) or kind.values.dtype != torch.float8_e4m3fn:
        return None
    (high, wide), (outputs, inputs) = kind.block, kind.shape[-2:]
    if kind.values.ndim != 2 or high % BLOCK or wide % BLOCK:
        return None
    scales = kind.scales.float().repeat_interleave(high // BLOCK, 0)
    scales = scales.repeat_interleave(wide // BLOCK, 1)
    scales = scales[: -(-outputs // BLOCK), : -(-inputs // BLOCK)]
    return Fp8BlockWeight(values=kind.values.contiguous(), scales=scales.contiguous())


def joined(parts: Sequence[QuantisedWeight]) -> tuple[QuantisedWeight, ...]:
    """Join weights of the same inputs along their outputs; neighbours that differ stay apart."""
    whole: list[QuantisedWeight] = []
    for part in parts:
        both = _join(whole[-1], part) if whole else None
        if both is None:
            whole.append(part)
        else:
            whole[-1] = both
    return tuple(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grouped:
    """Unsigned codes [O, I] in groups of one size, scales and zeros [G, O], and `order`."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    size: int
    order: Tensor | None


def _grouped(kind: IntWeight, bits: int, max_zero: int) -> _Grouped | None:
    """Sort inputs by group; None = groups have no size that formats have, or a zero is too large.

    bits:  of signed codes, which half of their range is added to
    """
    groups, order = kind.groups, None
    if bool((groups.diff() < 0).any()):
        order = groups.argsort(stable=True)
        groups = groups[order]
    size = _group_size(groups)
    lowest = 0 if kind.codes.dtype == torch.uint8 else 1 << bits - 1
    zeros = torch.zeros_like(kind.scales, dtype=torch.int32)
    zeros += lowest if kind.zeros is None else kind.zeros.int() + lowest
    if size is None or bool(((zeros < 0) | (zeros > max_zero)).any()):
        return None
    codes = (kind.codes.to(torch.int16) + lowest).to(torch.uint8)
    of_group = groups[::size]
    return _Grouped(
        codes=codes if order is None else codes[:, order],
        scales=kind.scales.T[of_group].contiguous(),
        zeros=zeros.T[of_group].to(torch.uint8).contiguous(),
        size=size,
        order=order,
    )


def _to_int4(kind: IntWeight) -> Int4Weight | None:
    found = _grouped(kind, kind.bits, MAX_ZERO)
    if found is None:
        return None
    packed = pack_int4(found.codes, found.scales, found.zeros, group_size=found.size)
    return replace(packed, order=found.order)


def _to_int8_groups(kind: IntWeight) -> Int8GroupWeight | None:
    found = _grouped(kind, 8, 255)
    if found is None:
        return None
    return Int8GroupWeight(
        values=found.codes.contiguous(),
        scales=found.scales,
        zeros=found.zeros,
        group_size=found.size,
        order=found.order,
    )


def _group_size(groups: Tensor) -> int | None:
    """Return the size of groups in which ascending `groups` [I] are the same; None = there is none.

    It is the largest one that formats may have, except for a single group, which is one run.
    """
    inputs = len(groups)
    changes = groups.diff().nonzero().flatten() + 1
    if len(changes) == 0:
        return max(1, -(-inputs // RUN)) * RUN
    first = int(changes[0])
    sizes = (first, *SMALL_GROUPS) if first % RUN == 0 else SMALL_GROUPS
    return next((size for size in sizes if bool((changes % size == 0).all())), None)


def _to_int8(kind: IntWeight) -> Int8Weight | None:
    if kind.scales.shape[1] != 1:
        return None
    values = kind.codes.to(torch.int16)
    if kind.zeros is not None:
        values = values - kind.zeros.to(torch.int16)
    narrow = values.to(torch.int8)
    if not torch.equal(narrow.to(torch.int16), values):
        return None
    return Int8Weight(values=narrow, scales=kind.scales[:, 0].float())


def _to_fp8(kind: Float8Weight) -> Fp8Weight | Fp8BlockWeight | None:
    high, wide = kind.block
    outputs, inputs = kind.shape[-2:]
    if wide < inputs or kind.values.ndim != 2 or kind.values.dtype != torch.float8_e4m3fn:
        return to_fp8_blocks(kind)
    scales = kind.scales[:, 0].float().repeat_interleave(min(high, outputs))[:outputs]
    return Fp8Weight(values=kind.values.contiguous(), scales=scales.contiguous())


def _to_fp4(kind: Float4Weight) -> Fp4GroupWeight | None:
    if len(kind.shape) != 2 or kind.scales.dtype not in FP4_SCALES:
        return None
    given = kind.shape[1] // kind.scales.shape[1]
    size = next((size for size in FP4_GROUPS if given % size == 0), None)
    if size is None:
        return None
    codes = torch.stack((kind.values & 15, kind.values >> 4), dim=2).flatten(1)
    scales = kind.scales.view(torch.uint8).repeat_interleave(given // size, 1).T.contiguous()
    return Fp4GroupWeight(
        values=in_runs(codes, MAX_HALF),
        scales=scales.view(kind.scales.dtype),
        factors=None if kind.factors is None else kind.factors.contiguous(),
        inputs=kind.shape[1],
        group_size=size,
    )


def _join(one: QuantisedWeight, other: QuantisedWeight) -> QuantisedWeight | None:
    """Return one weight with the outputs of both; None = they cannot be one."""
    values, scales = (one.values, other.values), (one.scales, other.scales)
    match one, other:
        case Int8Weight(), Int8Weight():
            return Int8Weight(values=torch.cat(values), scales=torch.cat(scales))
        case Fp8Weight(input_scale=None), Fp8Weight(input_scale=None):
            return Fp8Weight(values=torch.cat(values), scales=torch.cat(scales))
        case Fp8BlockWeight(), Fp8BlockWeight() if len(one.values) % BLOCK == 0:
            return Fp8BlockWeight(values=torch.cat(values), scales=torch.cat(scales))
    if isinstance(one, GroupWeight) and isinstance(other, GroupWeight) and are_alike(one, other):
        others, axes = tensors_of(other), {"values": 0, "factors": 0, "scales": 1, "zeros": 1}
        both = {
            name: torch.cat((tensor, others[name]), dim=axes[name])
            for name, tensor in tensors_of(one).items()
            if name in axes
        }
        return replace(one, **both)  # type: ignore[arg-type]
    return None


def are_alike(one: StackableWeight, other: StackableWeight) -> bool:
    """Return whether two weights, or a weight and a stack, differ in numbers and outputs only."""
    if not isinstance(one, GroupWeight) or not isinstance(other, GroupWeight):
        return type(one) is type(other)
    if one.order is None or other.order is None:
        is_same_order = one.order is other.order
    else:
        is_same_order = torch.equal(one.order, other.order)
    return (
        is_same_order
        and type(one) is type(other)
        and tensors_of(one).keys() == tensors_of(other).keys()
        and (one.group_size, one.inputs) == (other.group_size, other.inputs)
        and one.scales.dtype == other.scales.dtype
    )
