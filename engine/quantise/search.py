"""Rounds weights to integers with searched scales, a group of inputs at a time.

Minimum and maximum of a group are seldom its best range. For each group the search tries narrower
ranges, fits the scale to the codes by least squares, rounds it to the dtype in which it is stored,
and keeps what has the least squared error. Deterministic; knows no files and no models.

Legend: O outputs, I inputs, G groups of inputs, g inputs of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from remora.kernels.quantised.weight_kinds import IntWeight

FULL_RANGE = (1.0,)
RANGES = tuple(1.0 - 0.03 * step for step in range(17))  # shares of the full range that are tried
AT_ONCE = 1 << 20  # weights searched at a time, which bounds the memory
LEAST_SCALE = 2.0**-24  # the least positive float16: the scale of a group of zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a weight is stored.

    bits:         of a code
    group_size:   inputs that share a scale; it divides the inputs of the weight
    symmetric:    whether the zero point is the middle of the codes, for all groups
    scale_dtype:  of stored scales
    """

    bits: int
    group_size: int
    symmetric: bool
    scale_dtype: torch.dtype

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The code of zero in a symmetric scheme."""
        return 1 << self.bits - 1

    def groups(self, num_inputs: int) -> Tensor:
        """Return the group of each input, [I]."""
        return torch.arange(num_inputs) // self.group_size


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers to which a weight is rounded: (code - zero) * scale.

    scales:  [O, G] in the scheme's dtype
    zeros:   [O, G] uint8
    """

    scales: Tensor
    zeros: Tensor


def search_grid(
    weight: Tensor,
    scheme: Scheme,
    importance: Tensor | None = None,
    *,
    ranges: Sequence[float] = RANGES,
) -> Grid:
    """Return the grid with the least squared error for each group.

    weight:      [O, I]
    importance:  [I], factors on the squared errors: the mean square of each input; None = equal
    ranges:      shares of each group's full range that are tried
    """
    outputs, inputs = weight.shape
    num_groups = inputs // scheme.group_size
    scales = torch.empty(outputs, num_groups, dtype=scheme.scale_dtype)
    zeros = torch.empty(outputs, num_groups, dtype=torch.uint8)
    factors = torch.ones(inputs) if importance is None else importance.float()
    factors = factors.view(num_groups, scheme.group_size)
    step = max(1, AT_ONCE // inputs)
    for first in range(0, outputs, step):
        rows = slice(first, min(first + step, outputs))
        grouped = weight[rows].float().reshape(-1, num_groups, scheme.group_size)
        scales[rows], zeros[rows] = _search(grouped, factors, scheme, ranges)
    return Grid(scales, zeros)


def round_to_grid(weight: Tensor, grid: Grid, scheme: Scheme) -> IntWeight:
    """Round each weight to the nearest number of the grid. weight: [O, I]"""
    grouped = weight.float().reshape(len(weight), -1, scheme.group_size)
    codes = _codes(grouped, grid.scales.float()[..., None], grid.zeros.float()[..., None], scheme)
    return as_kind(codes.flatten(1).to(torch.uint8), grid, scheme)


def as_kind(codes: Tensor, grid: Grid, scheme: Scheme) -> IntWeight:
    """Return codes [O, I] uint8 on a grid as a kind of weight."""
    return IntWeight(
        codes=codes,
        scales=grid.scales,
        zeros=grid.zeros,
        groups=scheme.groups(codes.shape[1]),
        bits=scheme.bits,
    )


def _search(
    weight: Tensor, factors: Tensor, scheme: Scheme, ranges: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return scales and zeros [O, G] for a weight [O, G, g] with factors [G, g]."""
    low, high = _bounds(weight, scheme)
    best = torch.full(low.shape, torch.inf)
    scales = torch.empty(low.shape, dtype=scheme.scale_dtype)
    zeros = torch.empty(low.shape)
    for share in ranges:
        scale = ((high - low) * share / scheme.top).clamp(min=LEAST_SCALE)
        zero = _zero(low * share, scale, scheme)
        fitted = _fit(weight, factors, scale, zero, scheme)
        for tried in (scale, fitted):
            kept = tried.to(scheme.scale_dtype)
            error = _error(weight, factors, kept.float(), zero, scheme)
            better = error < best
            best = torch.where(better, error, best)
            scales = torch.where(better, kept, scales)
            zeros = torch.where(better, zero, zeros)
    return scales, zeros.to(torch.uint8)


def _bounds(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return the full range of each group; zero is within it."""
    low, high = weight.amin(-1).clamp(max=0), weight.amax(-1).clamp(min=0)
    if not scheme.symmetric:
        return low, high
    # The codes below the middle are one more than above it.
    half = torch.maximum(-low / scheme.middle, high / (scheme.middle - 1)) * scheme.top / 2
    return -half, half


def _zero(low: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    if scheme.symmetric:
        return torch.full_like(scale, scheme.middle)
    return (-low / scale).round_().clamp_(0, scheme.top)


def _fit(weight: Tensor, factors: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme) -> Tensor:
    """Return the scales [O, G] that are best for the codes which `scale` gives."""
    steps = _codes(weight, scale[..., None], zero[..., None], scheme).sub_(zero[..., None])
    weighted = steps * factors
    square = weighted.mul(steps).sum(-1)
    fitted = weighted.mul_(weight).sum(-1) / square
    return torch.where((square > 0) & (fitted > 0), fitted, scale).clamp_(min=LEAST_SCALE)


def _error(weight: Tensor, factors: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme) -> Tensor:
    scale, zero = scale[..., None], zero[..., None]
    off = _codes(weight, scale, zero, scheme).sub_(zero).mul_(scale).sub_(weight)
    return off.square_().mul_(factors).sum(-1)


def _codes(weight: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme) -> Tensor:
    return (weight / scale).round_().add_(zero).clamp_(0, scheme.top)
