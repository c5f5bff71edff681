"""Triton functions that multiply weights in groups of inputs, decoded in registers.

A step is a run of two halves of consecutive inputs. 4-bit weights are read as bytes whose low bits
are the first half and whose high bits the second (`quant_formats.in_runs`).

- Integers: a number or-ed into the last fraction bits of a constant yields the constant plus the
  number in one instruction. Subtracting the zero point is exact, so scales are applied to a group's
  sum in float32.
- 4-bit floats: their bits are shifted to their places in a wider format, exactly up to a power of
  two. They are multiplied with the scales of their groups, which is exact in bfloat16, and for the
  scales of NVFP4 in float16. Those of MXFP4 exceed its range: rows of float16 are multiplied by
  tensor cores as tf32, which holds rows and weights exactly.

FORMAT is "int4", "int8", "mxfp4" or "nvfp4".

Legend, and suffixes of blocks: R rows of a tile, C columns of y (outputs), K inputs of a run, H of
its halves.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.products import load_weights
from remora.kernels.quantised.quant_formats import (
    Fp4GroupWeight,
    GroupWeight,
    Int4Weight,
)


def weight_bits(weight: GroupWeight) -> int:
    """Return the bits of an element in memory."""
    return 4 if isinstance(weight, Int4Weight | Fp4GroupWeight) else 8


def constants_of(weight: GroupWeight) -> dict[str, Any]:
    """Return the constants of kernels that call `add_run`."""
    if isinstance(weight, Fp4GroupWeight):
        of_scales = {torch.float8_e8m0fnu: "mxfp4", torch.float8_e4m3fn: "nvfp4"}
        name = of_scales[weight.scales.dtype]
    else:
        name = "int4" if isinstance(weight, Int4Weight) else "int8"
    return {"FORMAT": name, "K": 2 * weight.half, "GROUP_SIZE": weight.group_size}


def operands_of(weight: GroupWeight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return scales, zero points and factors, as kernels read them."""
    if isinstance(weight, Fp4GroupWeight):
        return weight.scales.view(torch.uint8), None, weight.factors
    return weight.scales, weight.zeros, None


@triton.jit
def add_run(
    sum_CR: tl.tensor,
    low_HR: tl.tensor,
    high_HR: tl.tensor,
    w_C: tl.tensor,
    scales_C: tl.tensor,
    zeros_C: tl.tensor | None,
    run: int,
    inputs: int,
    groups: int,
    group_stride: int,
    FORMAT: tl.constexpr,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> tl.tensor:
    """Return a sum [C, R] with the product of a run added.

    low_HR, high_HR:  the rows' inputs of each half
    w_C:              pointers to the columns' first elements
    scales_C:         pointers to the columns' scales of group 0, and `zeros_C` to zero points
    run:              first input of the run
    group_stride:     distance of a column's scales
    """
    H: tl.constexpr = K // 2
    if FORMAT == "int8":
        low_CH = load_weights(w_C, run + tl.arange(0, H), inputs, IS_EVEN)
        high_CH = load_weights(w_C, run + H + tl.arange(0, H), inputs, IS_EVEN)
    else:
        bytes_CH = tl.load(w_C[:, None] + (run // 2 + tl.arange(0, H))[None, :])
        low_CH, high_CH = bytes_CH & 15, bytes_CH >> 4
    if FORMAT == "mxfp4" or FORMAT == "nvfp4":
        sum_CR = add_fp4(
            sum_CR, low_CH, low_HR, scales_C, run, groups, group_stride, FORMAT, H, GROUP_SIZE
        )
        return add_fp4(
            sum_CR, high_CH, high_HR, scales_C, run + H, groups, group_stride, FORMAT, H, GROUP_SIZE
        )
    at = (run // GROUP_SIZE) * group_stride
    low_zero_C = tl.load(zeros_C + at)
    high_zero_C = low_zero_C
    next_at = tl.minimum(run // GROUP_SIZE + 1, groups - 1) * group_stride
    if GROUP_SIZE == H:
        high_zero_C = tl.load(zeros_C + next_at)
    low_w_CH = integers(low_CH, low_zero_C, FORMAT, low_HR.dtype)
    high_w_CH = integers(high_CH, high_zero_C, FORMAT, low_HR.dtype)
    low_CR = tl.dot(low_w_CH, low_HR, input_precision="ieee")
    scale_C = tl.load(scales_C + at).to(tl.float32)
    if GROUP_SIZE == H:
        sum_CR += low_CR * scale_C[:, None]
        high_CR = tl.dot(high_w_CH, high_HR, input_precision="ieee")
        sum_CR += high_CR * tl.load(scales_C + next_at).to(tl.float32)[:, None]
    else:
        both_CR = tl.dot(high_w_CH, high_HR, low_CR, input_precision="ieee")
        sum_CR += both_CR * scale_C[:, None]
    return sum_CR


@triton.jit
def integers(
    codes_CH: tl.tensor, zero_C: tl.tensor, FORMAT: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    """Return integers minus their zero points, as floats."""
    if FORMAT == "int8":
        return (codes_CH.to(tl.int16) - zero_C.to(tl.int16)[:, None]).to(DTYPE)
    FRACTION: tl.constexpr = DTYPE.fp_mantissa_width
    ONE: tl.constexpr = DTYPE.exponent_bias + FRACTION << FRACTION  # its last fraction bit is 1
    bits_CH = codes_CH.to(bits_of(DTYPE)) | ONE
    less_C = (zero_C.to(tl.float32) + (1 << FRACTION)).to(DTYPE)
    return bits_CH.to(DTYPE, bitcast=True) - less_C[:, None]


@triton.jit
def add_fp4(
    sum_CR: tl.tensor,
    codes_CH: tl.tensor,
    x_HR: tl.tensor,
    scales_C: tl.tensor,
    start: int,
    groups: int,
    group_stride: int,
    FORMAT: tl.constexpr,
    H: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
) -> tl.tensor:
    """Return a sum [C, R] with the product of half a run added; groups past the end are padding."""
    IS_NARROW: tl.constexpr = FORMAT == "mxfp4" and x_HR.dtype == tl.float16
    DTYPE: tl.constexpr = tl.float32 if IS_NARROW else x_HR.dtype
    C: tl.constexpr = codes_CH.shape[0]
    GROUPS: tl.constexpr = H // GROUP_SIZE
    group_G = tl.minimum(start // GROUP_SIZE + tl.arange(0, GROUPS), groups - 1)
    scale_CG = tl.load(scales_C[:, None] + (group_G * group_stride)[None, :])
    if FORMAT == "mxfp4":
        scale_CG = power_of_two(scale_CG, DTYPE)
    else:
        scale_CG = widened(scale_CG, 8, 3, 7, DTYPE)
    scale_CH = tl.broadcast_to(scale_CG[:, :, None], [C, GROUPS, GROUP_SIZE]).reshape([C, H])
    w_CH = widened(codes_CH, 4, 1, 1, DTYPE) * scale_CH
    return tl.dot(w_CH, x_HR.to(DTYPE), sum_CR, input_precision="tf32" if IS_NARROW else "ieee")


@triton.jit
def widened(
    codes: tl.tensor,
    BITS: tl.constexpr,
    FRACTION: tl.constexpr,
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Return small floats of so many bits in a wider format; also those below the normal ones."""
    SIGN: tl.constexpr = 1 << BITS - 1
    bits = codes.to(bits_of(DTYPE))
    rest = (bits & SIGN - 1) << DTYPE.fp_mantissa_width - FRACTION
    sign = (bits & SIGN) << DTYPE.primitive_bitwidth - BITS
    return (sign | rest).to(DTYPE, bitcast=True) * 2.0 ** (DTYPE.exponent_bias - BIAS)


@triton.jit
def power_of_two(exponents: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return the numbers of 8-bit exponents; the least, 2 ** -127, is below the normal ones."""
    FRACTION: tl.constexpr = DTYPE.fp_mantissa_width
    normal = exponents.to(bits_of(DTYPE)) << FRACTION
    bits = tl.where(exponents == 0, 1 << FRACTION - 1, normal)
    return bits.to(bits_of(DTYPE)).to(DTYPE, bitcast=True)


@triton.constexpr_function
def bits_of(dtype: Any) -> Any:
    """Return the unsigned integers of the size of a float."""
    return tl.uint32 if dtype.primitive_bitwidth == 32 else tl.uint16
