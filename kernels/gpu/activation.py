"""Triton kernel of `kernels/activation.py`, which specifies it.

Memory-bound. Programs are small, so that few tokens fill the GPU: a thread loads 16 bytes of the
gate and 16 of the up projection.

Legend, and suffixes of blocks: T tokens, D columns of a half; C columns of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS, NUM_WARPS = 1024, 4


def activate_and_mul(gate_up: Tensor, gate: str, out: Tensor) -> None:
    """Compute gate(first half) * second half.

    gate_up:  [T, 2 * D], each row contiguous
    gate:     "silu", "gelu_erf" or "gelu_tanh"
    out:      [T, D] contiguous; overwritten
    """
    num_tokens, dim = out.shape
    if out.numel() > 0:
        assert gate_up.stride(1) == 1
        activation_kernel[(num_tokens, triton.cdiv(dim, COLUMNS))](
            gate_up,
            out,
            dim,
            gate_up.stride(0),
            GATE=gate,
            C=COLUMNS,
            num_warps=NUM_WARPS,
            num_stages=1,
            enable_fp_fusion=True,
        )


@triton.jit
def activation_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    dim: int,
    stride: int,
    GATE: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Program (token, C columns)."""
    token = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    is_column_C = column_C < dim
    from_C = gate_up + token * stride + column_C
    gate_C = tl.load(from_C, mask=is_column_C, other=0.0)
    up_C = tl.load(from_C + dim, mask=is_column_C, other=0.0)
    x_C = gate_C.to(tl.float32)
    if GATE == "silu":
        active_C = x_C * tl.sigmoid(x_C)
    elif GATE == "gelu_erf":
        active_C = 0.5 * x_C * (1.0 + tl.erf(x_C * 0.7071067811865476))
    else:
        # (1 + tanh(u)) / 2 is sigmoid(2 u), which needs no tanh and loses nothing far below 0.
        inner_C = 1.5957691216057308 * (x_C + 0.044715 * x_C * x_C * x_C)
        active_C = x_C * tl.sigmoid(inner_C)
    active_C = active_C.to(gate_C.dtype).to(tl.float32)
    tl.store(
        out + token * dim + column_C, (active_C * up_C.to(tl.float32)).to(gate_C.dtype), is_column_C
    )
