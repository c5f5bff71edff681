"""Triton kernel of `kernels/norm.py`, which specifies it.

A program holds whole rows in registers: each row is read once and summed by one program, so its
bits do not depend on other rows. The residual stream is added, written back and normalised in the
same launch.

Legend, and suffixes of blocks: A, B the axes of rows, D elements of a row; M rows of a program, C
columns, a power of two.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# Elements of a program's rows: enough for 16-byte loads of each thread. A wide row has one program,
# with 16 to 32 elements per thread.
MIN_ELEMENTS = 1024
MAX_DIM = 32768
ELEMENTS_PER_WARP = 512
MAX_WARPS = 16


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """Normalise rows, or their sums with the residual stream.

    x:         [A, B, D], each row contiguous
    residual:  as `x`; x is added to it in place and the sum normalised; None = normalise x
    weight:    [D]
    out:       [A, B, D] contiguous; overwritten
    """
    outer, inner, dim = x.shape
    adds = residual is not None
    residual = x if residual is None else residual
    num_rows = outer * inner
    if num_rows == 0:
        return
    assert 0 < dim <= MAX_DIM
    assert x.stride(2) == residual.stride(2) == 1
    columns = triton.next_power_of_2(dim)
    rows = max(1, MIN_ELEMENTS // columns)
    norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        residual,
        weight,
        out,
        eps,
        num_rows,
        inner,
        dim,
        x.stride(0),
        x.stride(1),
        residual.stride(0),
        residual.stride(1),
        ADDS=adds,
        M=rows,
        C=columns,
        **_options(rows * columns),
    )


def _options(elements: int) -> dict[str, Any]:
    """Return Triton's launch options; a thread holds 16 elements, more for long rows."""
    num_warps = min(MAX_WARPS, max(1, elements // ELEMENTS_PER_WARP))
    return {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": True}


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: float,
    num_rows: int,
    inner: int,
    dim: int,
    x_outer: int,
    x_inner: int,
    residual_outer: int,
    residual_inner: int,
    ADDS: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Program (M rows of all A * B)."""
    row_M = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    column_C = tl.arange(0, C)
    is_column_C = column_C < dim
    is_here_MC = (row_M < num_rows)[:, None] & is_column_C[None, :]
    outer_M, inner_M = row_M // inner, row_M % inner
    from_M = x + outer_M * x_outer + inner_M * x_inner
    x_MC = tl.load(from_M[:, None] + column_C[None, :], mask=is_here_MC, other=0.0)
    wide_MC = x_MC.to(tl.float32)
    if ADDS:
        stream_M = residual + outer_M * residual_outer + inner_M * residual_inner
        stream_MC = stream_M[:, None] + column_C[None, :]
        before_MC = tl.load(stream_MC, mask=is_here_MC, other=0.0)
        sum_MC = (wide_MC + before_MC.to(tl.float32)).to(before_MC.dtype)
        tl.store(stream_MC, sum_MC, mask=is_here_MC)
        wide_MC = sum_MC.to(tl.float32)
    mean_M = tl.sum(wide_MC * wide_MC, axis=1) / dim
    normed_MC = (wide_MC * tl.rsqrt(mean_M + eps)[:, None]).to(x_MC.dtype)
    weight_C = tl.load(weight + column_C, mask=is_column_C, other=0.0)
    out_MC = normed_MC.to(tl.float32) * weight_C.to(tl.float32)[None, :]
    to_MC = out + row_M[:, None] * dim + column_C[None, :]
    tl.store(to_MC, out_MC.to(x_MC.dtype), mask=is_here_MC)
