"""Triton functions that multiply a block of rows with the weights of their expert.

They return the sums of some columns and, for gated products, of the ups of the same columns.

Legend, and suffixes of blocks: as in `moe.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remora.kernels.gpu.groups import add_run
from remora.kernels.gpu.products import load_rows, load_weights


@triton.jit
def plain_sums(
    x_R: tl.tensor,
    w_C: tl.tensor,
    up_C: tl.tensor,
    inputs: int,
    IS_GATED: tl.constexpr,
    K: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the products of rows with columns and with ups, for weights of the rows' type."""
    sum_CR = tl.zeros([w_C.shape[0], x_R.shape[0]], tl.float32)
    up_CR = sum_CR
    for block in range(0, inputs, K):
        input_K = block + tl.arange(0, K)
        x_KR = load_rows(x_R, input_K, inputs, IS_EVEN)
        w_CK = load_weights(w_C, input_K, inputs, IS_EVEN)
        sum_CR = tl.dot(w_CK, x_KR, sum_CR, input_precision="ieee")
        if IS_GATED:
            w_CK = load_weights(up_C, input_K, inputs, IS_EVEN)
            up_CR = tl.dot(w_CK, x_KR, up_CR, input_precision="ieee")
    return sum_CR, up_CR


@triton.jit
def fp8_sums(
    x_R: tl.tensor,
    x_scales_R: tl.tensor,
    w_C: tl.tensor,
    up_C: tl.tensor,
    scales: tl.tensor,
    up_scales: tl.tensor,
    num_rows: int,
    inputs: int,
    IS_GATED: tl.constexpr,
    K: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`plain_sums` of float8, with a scale for each row and step, and for each step's weights."""
    sum_CR = tl.zeros([w_C.shape[0], x_R.shape[0]], tl.float32)
    up_CR = sum_CR
    for block in range(0, inputs, K):
        input_K = block + tl.arange(0, K)
        x_KR = load_rows(x_R, input_K, inputs, IS_EVEN)
        w_CK = load_weights(w_C, input_K, inputs, IS_EVEN)
        scale_R = tl.load(x_scales_R + block // K * num_rows)[None, :]
        sum_CR += tl.dot(w_CK, x_KR) * (scale_R * tl.load(scales + block // K))
        if IS_GATED:
            w_CK = load_weights(up_C, input_K, inputs, IS_EVEN)
            up_CR += tl.dot(w_CK, x_KR) * (scale_R * tl.load(up_scales + block // K))
    return sum_CR, up_CR


@triton.jit
def group_sums(
    x_R: tl.tensor,
    w_C: tl.tensor,
    up_C: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor | None,
    at_C: tl.tensor,
    columns: int,
    inputs: int,
    groups: int,
    IS_GATED: tl.constexpr,
    FORMAT: tl.constexpr,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`plain_sums` of weights in groups, see `add_run`."""
    sum_CR = tl.zeros([w_C.shape[0], x_R.shape[0]], tl.float32)
    up_CR = sum_CR
    stride = columns * 2 if IS_GATED else columns
    scales_C, zeros_C = scales + at_C, (scales if zeros is None else zeros) + at_C
    for run in range(0, inputs, K):
        low_H = run + tl.arange(0, K // 2)
        low_HR = load_rows(x_R, low_H, inputs, IS_EVEN)
        high_HR = load_rows(x_R, low_H + K // 2, inputs, IS_EVEN)
        sum_CR = add_run(
            *(sum_CR, low_HR, high_HR, w_C, scales_C, zeros_C, run, inputs, groups, stride),
            *(FORMAT, K, GROUP_SIZE, IS_EVEN),
        )
        if IS_GATED:
            up_CR = add_run(
                *(up_CR, low_HR, high_HR, up_C, scales_C + columns, zeros_C + columns, run),
                *(inputs, groups, stride, FORMAT, K, GROUP_SIZE, IS_EVEN),
            )
    return sum_CR, up_CR


@triton.jit
def finished(
    sum_CR: tl.tensor,
    up_CR: tl.tensor,
    factors: tl.tensor | None,
    bias: tl.tensor | None,
    at_C: tl.tensor,
    columns: int,
    IS_GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return sums times factors of their columns, with biases added."""
    if factors is not None:
        sum_CR *= tl.load(factors + at_C)[:, None]
        if IS_GATED:
            up_CR *= tl.load(factors + at_C + columns)[:, None]
    if bias is not None:
        sum_CR += tl.load(bias + at_C).to(tl.float32)[:, None]
        if IS_GATED:
            up_CR += tl.load(bias + at_C + columns).to(tl.float32)[:, None]
    return sum_CR, up_CR
