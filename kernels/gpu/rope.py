"""Triton kernel of `kernels/rope.py`, which specifies it.

Legend, and suffixes of blocks: as in `heads.py`; T tokens, H heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.heads import OPTIONS, blocks_of, load_heads, rotate, store_heads


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, interleaved: bool) -> None:
    """Rotate every head of every token.

    x:         [T, H, D], each head contiguous
    cos, sin:  [T, P], each row contiguous
    out:       [T, H, D] contiguous; overwritten
    """
    num_tokens, num_heads, dim = x.shape
    pairs = cos.shape[1]
    if x.numel() == 0:
        return
    assert x.stride(2) == 1
    assert cos.stride() == sin.stride() == (cos.stride(0), 1)
    blocks = blocks_of(dim, pairs)
    rope_kernel[(num_tokens, triton.cdiv(num_heads, blocks["M"]))](
        x,
        cos,
        sin,
        out,
        num_heads,
        dim,
        pairs,
        x.stride(0),
        x.stride(1),
        cos.stride(0),
        INTERLEAVED=interleaved,
        **blocks,
        **OPTIONS,
    )


@triton.jit
def rope_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    num_heads: int,
    dim: int,
    pairs: int,
    x_stride: int,
    x_head: int,
    cos_stride: int,
    INTERLEAVED: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """Program (token, M heads)."""
    token = tl.program_id(0).to(tl.int64)
    head_M = tl.program_id(1) * M + tl.arange(0, M)
    is_head_M = head_M < num_heads
    dtype: tl.constexpr = x.dtype.element_ty
    first_MC, second_MC, rest_MR = load_heads(
        x + token * x_stride + head_M * x_head, is_head_M, pairs, dim, INTERLEAVED, C, R
    )
    at = token * cos_stride
    first_MC, second_MC = rotate(first_MC, second_MC, cos + at, sin + at, pairs, dtype)
    to_M = out + (token * num_heads + head_M) * dim
    store_heads(to_M, is_head_M, first_MC, second_MC, rest_MR, pairs, dim, INTERLEAVED)
