"""GPTQ (arXiv:2210.17323): rounds a weight so that the error of its products is small.

Inputs are rounded one after another, and what rounding one of them changes in the products is made
up for by the inputs that follow. The order is that of the inputs' mean squares, the largest first;
groups and their scales are fixed before (static groups), so no index of groups is stored.

Legend: O outputs, I inputs. Knows no files and no models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.quantise.search import Grid, Scheme, as_kind, round_to_grid, search_grid
from remora.kernels.quantised.weight_kinds import IntWeight

DAMPING = 0.01  # of the mean square, added to every input's
MAX_DAMPING = 1.0
BLOCK = 128  # inputs after whose rounding the rest of the weight is updated


def gptq(weight: Tensor, gram: Tensor, scheme: Scheme) -> IntWeight:
    """Round a weight [O, I] for inputs X [rows, I].

    gram:  X^T X [I, I], or a multiple of it
    The loss of each output, by `loss`, is at most that of rounding to the same grid.
    Raises ConfigError if the inputs are not finite.
    """
    weight, gram = weight.float(), gram.float()
    if not gram.any():  # no window has reached it
        return round_to_grid(weight, search_grid(weight, scheme), scheme)
    grid = search_grid(weight, scheme, gram.diagonal())
    order = gram.diagonal().argsort(descending=True, stable=True)
    factor = _inverse_factor(gram[order][:, order])
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    codes[:, order] = _in_order(
        weight[:, order], factor, grid, scheme.groups(len(order))[order], scheme.top
    )
    found, plain = as_kind(codes, grid, scheme), round_to_grid(weight, grid, scheme)
    is_worse = loss(weight, found, gram) > loss(weight, plain, gram)
    found.codes[is_worse] = plain.codes[is_worse]
    return found


def loss(weight: Tensor, rounded: IntWeight, gram: Tensor) -> Tensor:
    """Return the squared error of each output's products, [O]."""
    off = weight.float() - rounded.dequantised()
    return (off @ gram.float()).mul_(off).sum(1)


def _inverse_factor(gram: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the damped matrix's inverse."""
    diagonal = gram.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    damping = DAMPING
    while damping <= MAX_DAMPING:
        damped = gram + torch.eye(len(gram)) * (damping * diagonal)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
        damping *= 10
    raise ConfigError(
        "GPTQ cannot invert the products of a layer's inputs: the calibration text gives values "
        "that are not finite. Use another text, or --method round."
    )


def _in_order(weight: Tensor, factor: Tensor, grid: Grid, groups: Tensor, top: int) -> Tensor:
    """Round columns from the first to the last; returns codes [O, I] uint8.

    groups:  [I], of the columns
    """
    columns = weight.T.contiguous()  # a column's weights lie together
    codes = torch.empty(columns.shape, dtype=torch.uint8)
    scales, zeros = grid.scales.float().T.contiguous(), grid.zeros.float().T.contiguous()
    for first in range(0, len(columns), BLOCK):
        last = min(first + BLOCK, len(columns))
        errors = torch.empty(last - first, columns.shape[1])
        for at in range(first, last):
            scale, zero = scales[groups[at]], zeros[groups[at]]
            code = (columns[at] / scale).round_().add_(zero).clamp_(0, top)
            codes[at] = code
            error = columns[at].sub_(code.sub_(zero).mul_(scale)).div_(factor[at, at])
            errors[at - first] = error
            columns[at + 1 : last].addr_(factor[at, at + 1 : last], error, alpha=-1)
        columns[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
    return codes.T
