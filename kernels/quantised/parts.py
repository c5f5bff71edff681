"""Parts of quantised weights that ranks hold: ranges of outputs and inputs, of the same numbers.

Knows no ranks. Kinds that no product on a device multiplies are not cut.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from remora.kernels.quantised.weight_kinds import (
    Float4Weight,
    Float8Weight,
    IntWeight,
    WeightKind,
)


def part(kind: WeightKind, outputs: range, inputs: range) -> WeightKind | None:
    """Return a part of a weight [O, I]; None = this kind is not cut.

    Groups and blocks that are cut have their scales on both sides.
    """
    if kind.shape == (len(outputs), len(inputs)):
        return kind
    if isinstance(kind, IntWeight):
        return _part_of_ints(kind, outputs, inputs)
    if isinstance(kind, Float8Weight) and len(kind.shape) == 2:
        return _part_of_floats(kind, outputs, inputs)
    if isinstance(kind, Float4Weight) and len(kind.shape) == 2:
        return _part_of_halves(kind, outputs, inputs)
    return None


def _part_of_ints(kind: IntWeight, outputs: range, inputs: range) -> IntWeight:
    rows, columns = _slice(outputs), _slice(inputs)
    groups = kind.groups[columns]
    first, last = (int(groups.min()), int(groups.max())) if len(groups) else (0, 0)
    scales = rows, slice(first, last + 1)
    return replace(
        kind,
        codes=kind.codes[rows, columns],
        scales=kind.scales[scales],
        zeros=None if kind.zeros is None else kind.zeros[scales],
        groups=groups - first,
    )


def _part_of_floats(kind: Float8Weight, outputs: range, inputs: range) -> Float8Weight:
    high, wide = (
        _block(size, num_blocks, held)
        for size, num_blocks, held in zip(
            kind.block, kind.scales.shape, (outputs, inputs), strict=True
        )
    )
    of_rows = torch.arange(outputs.start, outputs.stop, high) // kind.block[0]
    of_columns = torch.arange(inputs.start, inputs.stop, wide) // kind.block[1]
    return Float8Weight(
        values=kind.values[_slice(outputs), _slice(inputs)],
        scales=kind.scales[of_rows][:, of_columns],
        block=(high, wide),
    )


def _part_of_halves(kind: Float4Weight, outputs: range, inputs: range) -> Float4Weight | None:
    """Return a part in groups that divide each one's beginning; None = it begins in a byte."""
    size = kind.shape[1] // kind.scales.shape[1]
    group = math.gcd(size, inputs.start, inputs.stop)
    if group % 2:
        return None
    rows = _slice(outputs)
    of_columns = torch.arange(inputs.start, inputs.stop, group) // size
    return Float4Weight(
        values=kind.values[rows, inputs.start // 2 : inputs.stop // 2],
        scales=kind.scales[rows][:, of_columns],
        factors=None if kind.factors is None else kind.factors[rows],
    )


def _block(size: int, num_blocks: int, held: range) -> int:
    """Return the largest size of blocks that divides each block at the beginning of a range."""
    return max(size, held.stop) if num_blocks == 1 else math.gcd(size, held.start)


def _slice(held: range) -> slice:
    return slice(held.start, held.stop)
