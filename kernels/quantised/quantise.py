"""Quantisation of activations, for products with quantised weights.

Scales are computed for each row, or each group of a row, so that a row does not depend on other
rows; only float8 with a static scale from the checkpoint has one for all rows. Symmetric: the
quantised value times its scale approximates the input. Knows no weights.

Legend: T rows, I inputs, G groups of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remora.kernels.dispatch import by_triton
from remora.kernels.quantised.quant_formats import GROUP, MAX_FP8, MAX_INT8, MIN_AMAX


def quantise_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to int8, ties to even.

    x:  [T, I] of any float type, each row contiguous
    Returns ([T, I] int8 within +-127, scales [T] float32: the row's largest number / 127).
    """
    if by_triton(x.device):
        from remora.kernels.gpu import quantise

        return quantise.quantise_rows(x, torch.int8)
    return quantise_int8_reference(x)


def quantise_fp8(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round rows to float8_e4m3fn.

    x:      [T, I] of any float type, each row contiguous
    scale:  [1] float32, static scale of all rows; larger inputs saturate; None = one per row
    Returns ([T, I] float8_e4m3fn, scales [T] float32, or `scale`).
    """
    if by_triton(x.device):
        from remora.kernels.gpu import quantise

        return quantise.quantise_rows(x, torch.float8_e4m3fn, scale)
    return quantise_fp8_reference(x, scale)


def quantise_fp8_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to float8_e4m3fn with a scale for each 128 inputs.

    x:  [T, I] of any float type, each row contiguous
    Returns ([T, I] float8_e4m3fn, scales [G, T] float32: a group's scales are contiguous).
    """
    if by_triton(x.device):
        from remora.kernels.gpu import quantise

        return quantise.quantise_groups(x)
    return quantise_fp8_groups_reference(x)


def quantise_int8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantise_int8` in torch."""
    scales = x.float().abs().amax(dim=1).clamp_min(MIN_AMAX) / MAX_INT8
    return (x.float() / scales[:, None]).round().clamp(-MAX_INT8, MAX_INT8).to(torch.int8), scales


def quantise_fp8_reference(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`quantise_fp8` in torch."""
    scales = x.float().abs().amax(dim=1).clamp_min(MIN_AMAX) / MAX_FP8 if scale is None else scale
    return _to_fp8(x.float() / scales[:, None]), scales


def quantise_fp8_groups_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantise_fp8_groups` in torch."""
    rows, inputs = x.shape
    groups = -(-inputs // GROUP)
    padded = torch.nn.functional.pad(x.float(), (0, groups * GROUP - inputs))
    padded = padded.view(rows, groups, GROUP)
    scales = padded.abs().amax(dim=2).clamp_min(MIN_AMAX) / MAX_FP8
    return _to_fp8((padded / scales[:, :, None]).flatten(1)[:, :inputs]), scales.T.contiguous()


def _to_fp8(x: Tensor) -> Tensor:
    return x.clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)
