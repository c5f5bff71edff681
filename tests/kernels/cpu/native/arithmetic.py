"""Sums of products in torch with the order and rounding of the native library, bit for bit.

float64 holds products of two float32 exactly; a sum that is rounded to odd in float64 and then to
float32 is rounded once (Boldo and Melquiond 2008). Denormal numbers do not occur.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor


class Bf16Sum(StrEnum):
    """How a library adds products of pairs of bfloat16 to a sum.

    WIDENED:  multiply-adds of float32, the even k of a pair first
    TILES:    of 32 k, even and odd ones are summed apart, and both sums are added
    BFDOT:    ARM's instruction: the sum of a pair is added; both additions round to odd
    """

    WIDENED = "widened"
    TILES = "tiles"
    BFDOT = "bfdot"


def add_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b in float64, rounded to odd: of two neighbours, to that with the odd last bit."""
    total = a + b
    other = total - a
    error = (a - (total - other)) + (b - other)
    bits = total.view(torch.int64)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where((error != 0) & (bits % 2 == 0), bits + step, bits).view(torch.float64)


def to_odd_float(x: Tensor) -> Tensor:
    """Round float64 to float32, to odd."""
    near = x.float()
    bits = near.view(torch.int32)
    toward_zero = torch.where(near.double().abs() > x.abs(), bits - 1, bits)
    return torch.where(near.double() != x, toward_zero | 1, bits).view(torch.float32)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32, rounded once."""
    return add_to_odd(a.double() * b.double(), c.double()).float()


def separate(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32; the product is rounded too."""
    return a * b + c


MultiplyAdd = Callable[[Tensor, Tensor, Tensor], Tensor]


def dot_float32(x: Tensor, w: Tensor, add: MultiplyAdd) -> Tensor:
    """Return x w^T of x [rows, k] and w [n, k], summed along ascending k."""
    total = torch.zeros(len(x), len(w))
    for k in range(x.shape[1]):
        total = add(x[:, k : k + 1], w[:, k], total)
    return total


def dot_bf16(x: Tensor, w: Tensor, add: MultiplyAdd, how: Bf16Sum) -> Tensor:
    """Return x w^T of values that bfloat16 can hold."""
    if how is Bf16Sum.WIDENED:
        return dot_float32(x, w, add)
    total = torch.zeros(len(x), len(w))
    width = 2 if how is Bf16Sum.BFDOT else 32
    for first in range(0, x.shape[1], width):
        part, columns = x[:, first : first + width], w[:, first : first + width]
        even, odd = (dot_float32(part[:, i::2], columns[:, i::2], add) for i in (0, 1))
        if how is Bf16Sum.TILES:
            total = total + (even + odd)
        else:
            pair = to_odd_float(add_to_odd(even.double(), odd.double()))
            total = to_odd_float(add_to_odd(total.double(), pair.double()))
    return total


def dot_grouped(
    x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor, Tensor | None], add: MultiplyAdd
) -> Tensor:
    """Return the product of quantised rows and weights, group after group.

    x:  levels [rows, groups, size] and scales [rows, groups]
    w:  levels [n, groups, size], scales [n, groups], and minima [n, groups] of int4
    """
    (levels, scales), (numbers, factors, least) = x, w
    total = torch.zeros(len(levels), len(numbers))
    for group in range(levels.shape[1]):
        values, columns = levels[:, group].double(), numbers[:, group].double()
        dot, factor = (values @ columns.T).float(), factors[:, group]
        if least is None:
            part = dot * factor
        else:
            part = add(dot, factor, least[:, group] * values.sum(1, keepdim=True).float())
        total = add(part, scales[:, group : group + 1], total)
    return total


def quantise_rows(x: Tensor, size: int, add: MultiplyAdd) -> tuple[Tensor, Tensor]:
    """Return levels [rows, groups, size] and scales [rows, groups] of x [rows, k]."""
    groups = in_groups(x, size)
    most = groups.abs().amax(2)
    inverse = torch.where(most > 0, 127 / most, 0.0)
    magic = torch.tensor(12582912.0)  # 1.5 * 2^23: a sum with it has no fraction
    return add(groups, inverse.unsqueeze(2), magic) - magic, most / 127


def quantise_bytes(w: Tensor, size: int, number: torch.dtype) -> tuple[Tensor, Tensor, None]:
    """Return levels and scales of weights in groups of `size`.

    number:  dtype of scales
    """
    groups = in_groups(w, size)
    scale = (groups.abs().amax(2) / 127).to(number).float()
    return _levels(groups, scale, torch.zeros_like(scale), -127, 127), scale, None


def quantise_from_least(w: Tensor, top: int, number: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels, scales and minima of weights in groups of 32, within their full range.

    top:     the last level
    number:  dtype of scales and minima
    """
    groups = in_groups(w, 32)
    least = groups.amin(2).to(number).float()
    scale = ((groups.amax(2) - least) / top).to(number).float()
    return _levels(groups, scale, least, 0, top), scale, least


def _levels(groups: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
    exact = (groups - offset.unsqueeze(2)) / scale.unsqueeze(2)
    return torch.where(scale.unsqueeze(2) > 0, exact, 0.0).clamp(low, high).round()


def in_groups(x: Tensor, size: int) -> Tensor:
    """Return rows [rows, k] as [rows, groups, size], padded with zeros."""
    padding = -x.shape[1] % size
    return torch.nn.functional.pad(x, (0, padding)).view(len(x), -1, size)


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor | None, centered: bool, epsilon: float, add: MultiplyAdd
) -> Tensor:
    """Return the RMS norm, or layer norm if centered, of x [rows, size]."""
    size = x.shape[1]
    center = _sum(x, torch.ones_like(x), add) / size if centered else torch.zeros(len(x), 1)
    apart = x - center
    # By numpy: torch's roots of float32 are not rounded exactly on every CPU.
    root = torch.from_numpy(np.sqrt((_sum(apart, apart, add) / size + epsilon).numpy()))
    factor = 1 / root
    out = apart * factor * weight
    return out if bias is None else out + bias


def _sum(x: Tensor, factors: Tensor, add: MultiplyAdd) -> Tensor:
    """Return sums of products [rows, 1]: 16 along the row, which are then added by halves."""
    lanes = torch.zeros(len(x), 16)
    for values, others in zip(
        *(in_groups(each, 16).unbind(1) for each in (x, factors)), strict=True
    ):
        lanes = add(values, others, lanes)
    while lanes.shape[1] > 1:
        first, second = lanes.chunk(2, 1)
        lanes = first + second
    return lanes
