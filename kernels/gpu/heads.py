"""Triton functions on heads in registers: load, normalise, rotate, quantise and store.

The kernels of `rope.py`, `kv_store.py` and `rope_store.py` share them. A head is held as the first
and second elements of its rotary pairs and the rest, which is not rotated. Arithmetic is float32;
results are rounded to the heads' dtype where the references round (after a norm, its weight, a
rotation), but not within a rotation.

Legend, and suffixes of blocks: D elements of a head, P pairs; M heads of a program, C pairs of a
block, E elements of both kinds, R the rest of one.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Elements of a program: 16 per thread (two 16-byte loads), so that few tokens fill the GPU.
ELEMENTS, NUM_WARPS = 1024, 2
OPTIONS: dict[str, Any] = {"num_warps": NUM_WARPS, "num_stages": 1, "enable_fp_fusion": True}


def blocks_of(dim: int, pairs: int) -> dict[str, int]:
    """Return block sizes for heads of `dim` elements, of which 2 * `pairs` are rotated."""
    assert 0 < 2 * pairs <= dim or dim == 1
    return {
        "M": max(1, ELEMENTS // triton.next_power_of_2(dim)),
        "C": triton.next_power_of_2(max(1, pairs)),
        "R": triton.next_power_of_2(max(1, dim - 2 * pairs)),
    }


@triton.jit
def load_heads(
    from_M: tl.tensor,
    is_head_M: tl.tensor,
    pairs: int,
    dim: int,
    INTERLEAVED: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return first and second elements [M, C] of pairs, and the rest [M, R]; float32, padded by 0.

    from_M:  pointers to the heads
    """
    M: tl.constexpr = from_M.shape[0]
    if INTERLEAVED:
        element_E = tl.arange(0, 2 * C)
        is_here_ME = is_head_M[:, None] & (element_E < 2 * pairs)[None, :]
        both_ME = tl.load(from_M[:, None] + element_E[None, :], mask=is_here_ME, other=0.0)
        first_MC, second_MC = tl.split(tl.reshape(both_ME, (M, C, 2)))
    else:
        pair_C = tl.arange(0, C)
        is_here_MC = is_head_M[:, None] & (pair_C < pairs)[None, :]
        at_MC = from_M[:, None] + pair_C[None, :]
        first_MC = tl.load(at_MC, mask=is_here_MC, other=0.0)
        second_MC = tl.load(at_MC + pairs, mask=is_here_MC, other=0.0)
    element_R = 2 * pairs + tl.arange(0, R)
    is_here_MR = is_head_M[:, None] & (element_R < dim)[None, :]
    rest_MR = tl.load(from_M[:, None] + element_R[None, :], mask=is_here_MR, other=0.0)
    return first_MC.to(tl.float32), second_MC.to(tl.float32), rest_MR.to(tl.float32)


@triton.jit
def store_heads(
    to_M: tl.tensor,
    is_head_M: tl.tensor,
    first_MC: tl.tensor,
    second_MC: tl.tensor,
    rest_MR: tl.tensor,
    pairs: int,
    dim: int,
    INTERLEAVED: tl.constexpr,
) -> None:
    """Write heads in the format of the destination. to_M: pointers to the heads."""
    M: tl.constexpr = first_MC.shape[0]
    C: tl.constexpr = first_MC.shape[1]
    R: tl.constexpr = rest_MR.shape[1]
    dtype: tl.constexpr = to_M.dtype.element_ty
    if INTERLEAVED:
        element_E = tl.arange(0, 2 * C)
        is_here_ME = is_head_M[:, None] & (element_E < 2 * pairs)[None, :]
        both_ME = tl.reshape(tl.join(first_MC.to(dtype), second_MC.to(dtype)), (M, 2 * C))
        tl.store(to_M[:, None] + element_E[None, :], both_ME, mask=is_here_ME)
    else:
        pair_C = tl.arange(0, C)
        is_here_MC = is_head_M[:, None] & (pair_C < pairs)[None, :]
        at_MC = to_M[:, None] + pair_C[None, :]
        tl.store(at_MC, first_MC.to(dtype), mask=is_here_MC)
        tl.store(at_MC + pairs, second_MC.to(dtype), mask=is_here_MC)
    element_R = 2 * pairs + tl.arange(0, R)
    is_here_MR = is_head_M[:, None] & (element_R < dim)[None, :]
    tl.store(to_M[:, None] + element_R[None, :], rest_MR.to(dtype), mask=is_here_MR)


@triton.jit
def rotate(
    first_MC: tl.tensor,
    second_MC: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    pairs: int,
    dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Rotate pairs by a token's angles and round. cos, sin: pointers to the token."""
    pair_C = tl.arange(0, first_MC.shape[1])
    # Every head reloads the angles from the cache; sharing a row would need exchanges of threads.
    at_MC = tl.full([first_MC.shape[0]], 0, tl.int32)[:, None] + pair_C[None, :]
    cos_MC = tl.load(cos + at_MC, mask=at_MC < pairs, other=0.0).to(tl.float32)
    sin_MC = tl.load(sin + at_MC, mask=at_MC < pairs, other=0.0).to(tl.float32)
    rotated_MC = first_MC * cos_MC - second_MC * sin_MC
    other_MC = second_MC * cos_MC + first_MC * sin_MC
    return rotated_MC.to(dtype).to(tl.float32), other_MC.to(dtype).to(tl.float32)


@triton.jit
def normalise(
    first_MC: tl.tensor,
    second_MC: tl.tensor,
    rest_MR: tl.tensor,
    weight: tl.tensor,
    eps: float,
    pairs: int,
    dim: int,
    dtype: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Divide heads by their root mean square and multiply by the weight [D], rounded after each."""
    C: tl.constexpr = first_MC.shape[1]
    R: tl.constexpr = rest_MR.shape[1]
    # Every head reloads the weight, like the angles in `rotate`.
    none_M = tl.full([first_MC.shape[0]], 0, tl.int32)
    w_first_MC, w_second_MC, w_rest_MR = load_heads(
        weight + none_M, none_M == 0, pairs, dim, INTERLEAVED, C, R
    )
    square_M = tl.sum(first_MC * first_MC + second_MC * second_MC, 1) + tl.sum(rest_MR * rest_MR, 1)
    factor_M = tl.rsqrt(square_M / dim + eps)[:, None]
    return (
        _weighted(first_MC * factor_M, w_first_MC, dtype),
        _weighted(second_MC * factor_M, w_second_MC, dtype),
        _weighted(rest_MR * factor_M, w_rest_MR, dtype),
    )


@triton.jit
def _weighted(normed: tl.tensor, weight: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return (normed.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def store_in_slot(
    pages_M: tl.tensor,
    scales_M: tl.tensor,
    static_scales: tl.tensor | None,
    static_at_M: tl.tensor,
    is_head_M: tl.tensor,
    first_MC: tl.tensor,
    second_MC: tl.tensor,
    rest_MR: tl.tensor,
    pairs: int,
    dim: int,
    dtype: tl.constexpr,
    QUANTISED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    """Write finite values of heads to a slot, quantised with their scales if requested.

    pages_M:    pointers to the heads in the pages
    static_scales, static_at_M:  of all tokens, and where those of the heads are; None = each token
                has its own
    dtype:      original format of the heads
    QUANTISED:  "int8", "e4m3", "e5m2" (the pages are bytes) or "no"
    """
    first_MC, second_MC = _finite(first_MC, dtype), _finite(second_MC, dtype)
    rest_MR = _finite(rest_MR, dtype)
    if QUANTISED != "no":
        of_float: tl.constexpr = 448.0 if QUANTISED == "e4m3" else 57344.0
        largest: tl.constexpr = 127.0 if QUANTISED == "int8" else of_float
        if static_scales is not None:
            scale_M = tl.load(static_scales + static_at_M, mask=is_head_M, other=1.0)
        else:
            most_M = tl.maximum(
                tl.max(tl.maximum(tl.abs(first_MC), tl.abs(second_MC)), 1),
                tl.max(tl.abs(rest_MR), 1),
            )
            scale_M = tl.div_rn(tl.maximum(most_M, 1e-30), largest).to(tl.bfloat16)
        tl.store(scales_M, scale_M, mask=is_head_M)
        divisor_M = scale_M.to(tl.float32)[:, None]
        first_MC = _quantise(first_MC, divisor_M, largest, QUANTISED)
        second_MC = _quantise(second_MC, divisor_M, largest, QUANTISED)
        rest_MR = _quantise(rest_MR, divisor_M, largest, QUANTISED)
    store_heads(pages_M, is_head_M, first_MC, second_MC, rest_MR, pairs, dim, INTERLEAVED)


@triton.jit
def _finite(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    if dtype == tl.float16:
        limited = tl.clamp(x, -65504.0, 65504.0)
    elif dtype == tl.bfloat16:
        limited = tl.clamp(x, -3.3895313892515355e38, 3.3895313892515355e38)
    else:
        limited = tl.clamp(x, -3.4028234663852886e38, 3.4028234663852886e38)
    return tl.where(x == x, limited, 0.0)


@triton.jit
def _quantise(
    x: tl.tensor, divisor: tl.tensor, largest: tl.constexpr, QUANTISED: tl.constexpr
) -> tl.tensor:
    """Round quotients to the nearest value of a format, ties to even; float8 as bits."""
    x = tl.clamp(tl.div_rn(x, divisor), -largest, largest)
    if QUANTISED == "int8":
        codes = _nearest_integer(x).to(tl.int8)
    elif QUANTISED == "e4m3":
        codes = _bits_of_float8(x, 3, 7)
    else:
        codes = _bits_of_float8(x, 2, 15)
    return codes


@triton.jit
def _bits_of_float8(x: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    """Round with integer arithmetic: Ampere has no instruction, and memory is the bottleneck.

    From 2^(1 - BIAS) on, the mantissa is cut, ties to even, and the exponent's bias changes from
    127. Smaller values are multiples of 2^(1 - BIAS - MANTISSA).
    """
    shift: tl.constexpr = 23 - MANTISSA
    sign = x.to(tl.int32, bitcast=True) >> 24 & 0x80
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    below_half: tl.constexpr = (1 << (shift - 1)) - 1
    normal = (bits + below_half + (bits >> shift & 1) >> shift) - (127 - BIAS << MANTISSA)
    units: tl.constexpr = 1 << (BIAS + MANTISSA - 1)
    small = _nearest_integer(size * units).to(tl.int32)
    is_small = bits < (128 - BIAS << 23)
    return (tl.where(is_small, small, normal) | sign).to(tl.uint8)


@triton.jit
def _nearest_integer(x: tl.tensor) -> tl.tensor:
    """Round a number below 2^22: around 1.5 * 2^23 the distance of floats is 1."""
    return (x + 12582912.0) - 12582912.0
