"""Triton kernels of `kernels/moe.py`.

Token-expert pairs are sorted into blocks (`moe_align.py`). A program multiplies a block of rows
with some columns of its expert's weight, transposed as in `products.py`. The first product computes
gates and ups of the same columns together and writes the gated result; the second writes each
pair's output to a row, and a last launch sums these in order.

Legend, and suffixes of blocks: R rows of a block, C columns (outputs), K inputs of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.arch import Arch, arch_of, has_fp8
from remora.kernels.gpu.moe_align import Blocks, align
from remora.kernels.gpu.products import (
    GROUP,
    TileLaunch,
    launch_for,
    load_rows,
    load_weights,
    table,
    tile_of,
)
from remora.kernels.gpu.quantise import quantise_groups
from remora.kernels.moe_rules import SILU, Gating
from remora.kernels.moe_weights import Biases, ExpertWeight, values_of
from remora.kernels.quantised.quant_formats import BLOCK, Fp8BlockWeight

# By rows of a block, for 16-bit elements; ups add as many columns as gates. Decode has few rows per
# expert and is bound by reading weights: 16 KiB or more per stage. On Hopper three stages let a
# multiprocessor hold two programs.
LAUNCHES = table(
    TileLaunch(rows=16, columns=32, inputs=128, num_warps=4, num_stages=4),
    TileLaunch(rows=32, columns=64, inputs=128, num_warps=4, num_stages=3),
    TileLaunch(rows=64, columns=64, inputs=64, num_warps=4, num_stages=4),
    TileLaunch(rows=128, columns=64, inputs=64, num_warps=8, num_stages=4),
    but={
        Arch.HOPPER: (
            TileLaunch(rows=16, columns=64, inputs=128, num_warps=4, num_stages=3),
            TileLaunch(rows=128, columns=64, inputs=64, num_warps=8, num_stages=3),
        ),
        Arch.BLACKWELL: (TileLaunch(rows=16, columns=64, inputs=128, num_warps=4, num_stages=4),),
    },
)
FP8_LAUNCHES = table(
    TileLaunch(rows=16, columns=64, inputs=BLOCK, num_warps=4, num_stages=5),
    TileLaunch(rows=32, columns=64, inputs=BLOCK, num_warps=4, num_stages=4),
    TileLaunch(rows=64, columns=64, inputs=BLOCK, num_warps=8, num_stages=4),
    but={Arch.SMALL: (TileLaunch(rows=64, columns=32, inputs=BLOCK, num_warps=8, num_stages=4),)},
)
WIDE_LAUNCH = TileLaunch(rows=16, columns=32, inputs=32, num_warps=4, num_stages=2)  # of float32
INVARIANT_PAIRS = 24  # assumed per expert, so that invariant blocks do not depend on the batch
COMBINED = 1024  # columns of a program that sums outputs


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    y: Tensor,
    *,
    biases: Biases,
    gating: Gating,
    first_expert: int,
    invariant: bool,
) -> None:
    """Compute `moe` into `y`."""
    if y.numel() == 0:
        return
    if isinstance(gate_up, Fp8BlockWeight) and not has_fp8(x.device):
        raise NotImplementedError("this GPU has no float8_e4m3fn products; use weights of 16 bits")
    assert x.stride(1) == 1
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    experts, wide, hidden = values_of(gate_up).shape
    launch = launch_of(x, INVARIANT_PAIRS * experts if invariant else ids.numel(), gate_up)
    blocks = align(ids, experts, first_expert, launch.rows)
    inner = torch.empty((blocks.num_rows, wide // 2), dtype=x.dtype, device=x.device)
    multiply(x, gate_up, blocks, inner, launch, ids, biases[0], gating)
    given = torch.empty((ids.numel(), hidden), dtype=x.dtype, device=x.device)
    multiply(inner, down, blocks, given, launch, ids, biases[1])
    combine_kernel[(len(x), triton.cdiv(hidden, COMBINED))](
        given,
        ids,
        weights,
        y,
        hidden,
        y.stride(0),
        first_expert,
        experts,
        TOP_K=ids.shape[1],
        C=COMBINED,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
    )


def launch_of(x: Tensor, pairs: int, weight: ExpertWeight) -> TileLaunch:
    """Return the launch whose blocks hold 1.25 times the average pairs of an expert."""
    if isinstance(weight, Tensor) and x.itemsize == 4:
        return WIDE_LAUNCH
    launches = FP8_LAUNCHES if isinstance(weight, Fp8BlockWeight) else LAUNCHES
    return launch_for(launches, arch_of(x.device), pairs * 5 // 4 // len(values_of(weight)))


def multiply(
    x: Tensor,
    weight: ExpertWeight,
    blocks: Blocks,
    y: Tensor,
    launch: TileLaunch,
    ids: Tensor,
    bias: Tensor | None,
    gating: Gating | None = None,
) -> None:
    """Multiply rows with their experts' weights.

    gating:  reads rows of tokens and writes gated rows of blocks; None = reads rows of blocks and
             writes rows of pairs
    """
    is_gated = gating is not None
    through = gating or SILU
    w, scales, w_scales = values_of(weight), None, None
    if isinstance(weight, Fp8BlockWeight):
        x, scales = quantise_groups(x)
        w_scales = weight.scales
    columns, inputs = y.shape[1], x.shape[1]
    tiles = len(blocks.experts) * triton.cdiv(columns, launch.columns)
    weight_bytes = w.itemsize * (2 if is_gated else 1)
    experts_kernel[(tiles,)](
        x,
        scales,
        w,
        w_scales,
        blocks.pairs,
        blocks.experts,
        bias,
        y,
        len(blocks.experts),
        columns,
        inputs,
        x.stride(0),
        len(x),
        ids.numel(),
        ids.shape[1],
        IS_GATED=is_gated,
        SHARPNESS=through.sharpness,
        OFFSET=through.offset,
        LIMIT=through.limit,
        R=launch.rows,
        C=launch.columns,
        K=launch.inputs,
        GROUP=GROUP,
        IS_EVEN=inputs % launch.inputs == 0,
        **launch.options(arch_of(x.device), x.itemsize, weight_bytes),
    )


@triton.jit(do_not_specialize=["num_blocks", "num_rows", "num_pairs"])
def experts_kernel(
    x: tl.tensor,
    x_scales: tl.tensor | None,
    w: tl.tensor,
    w_scales: tl.tensor | None,
    sorted_pairs: tl.tensor,
    block_experts: tl.tensor,
    bias: tl.tensor | None,
    y: tl.tensor,
    num_blocks: int,
    columns: int,
    inputs: int,
    x_stride: int,
    num_rows: int,
    num_pairs: int,
    top_k: int,
    IS_GATED: tl.constexpr,
    SHARPNESS: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> None:
    """Program (tile)."""
    from_row, from_column = tile_of(tl.program_id(0), num_blocks * R, columns, R, C, GROUP)
    expert = tl.load(block_experts + from_row // R).to(tl.int64)
    if expert < 0:
        return
    row_R = from_row + tl.arange(0, R)
    pair_R = tl.load(sorted_pairs + row_R)
    is_pair_R = pair_R < num_pairs
    from_R, to_R = row_R, pair_R
    if IS_GATED:
        from_R, to_R = tl.where(is_pair_R, pair_R // top_k, 0), row_R
    x_R = x + from_R.to(tl.int64) * x_stride
    column_C = tl.minimum(from_column + tl.arange(0, C), columns - 1).to(tl.int64)
    parts: tl.constexpr = 2 if IS_GATED else 1
    w_C = w + (expert * parts * columns + column_C) * inputs
    scales = (expert * tl.cdiv(parts * columns, K) + from_column // K) * tl.cdiv(inputs, K)
    up_C = w + (expert * parts * columns + columns + column_C) * inputs
    up_scales = columns // K * tl.cdiv(inputs, K)
    sum_CR = tl.full([C, R], 0.0, tl.float32)
    up_CR = sum_CR
    for block in range(0, inputs, K):
        input_K = block + tl.arange(0, K)
        x_KR = load_rows(x_R, input_K, inputs, IS_EVEN)
        w_CK = load_weights(w_C, input_K, inputs, IS_EVEN)
        if w_scales is None:
            sum_CR = tl.dot(w_CK, x_KR, sum_CR, input_precision="ieee")
            if IS_GATED:
                w_CK = load_weights(up_C, input_K, inputs, IS_EVEN)
                up_CR = tl.dot(w_CK, x_KR, up_CR, input_precision="ieee")
        else:
            at_scale = w_scales + scales + block // K
            scale_R = tl.load(x_scales + block // K * num_rows + from_R)[None, :]
            sum_CR += tl.dot(w_CK, x_KR) * (scale_R * tl.load(at_scale))
            if IS_GATED:
                w_CK = load_weights(up_C, input_K, inputs, IS_EVEN)
                up_CR += tl.dot(w_CK, x_KR) * (scale_R * tl.load(at_scale + up_scales))
    if bias is not None:
        bias_C = bias + expert * parts * columns + column_C
        sum_CR += tl.load(bias_C).to(tl.float32)[:, None]
        if IS_GATED:
            up_CR += tl.load(bias_C + columns).to(tl.float32)[:, None]
    if IS_GATED:
        sum_CR = through_gates(sum_CR, up_CR, SHARPNESS, OFFSET, LIMIT)
    store_rows(y, sum_CR, to_R, is_pair_R, from_column, columns, C)


@triton.jit
def through_gates(
    gate: tl.tensor,
    up: tl.tensor,
    SHARPNESS: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
) -> tl.tensor:
    """Apply `Gating`."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate / (1.0 + tl.exp(-SHARPNESS * gate)) * (up + OFFSET)


@triton.jit
def store_rows(
    y: tl.tensor,
    y_CR: tl.tensor,
    to_R: tl.tensor,
    is_row_R: tl.tensor,
    from_column: tl.tensor,
    columns: int,
    C: tl.constexpr,
) -> None:
    """Store columns of rows at their destinations."""
    column_C = from_column + tl.arange(0, C)
    to_RC = y + (to_R.to(tl.int64) * columns)[:, None] + column_C[None, :]
    is_there_RC = is_row_R[:, None] & (column_C < columns)[None, :]
    tl.store(to_RC, tl.trans(y_CR).to(y.dtype.element_ty), mask=is_there_RC)


@triton.jit
def combine_kernel(
    given: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    y: tl.tensor,
    hidden: int,
    y_stride: int,
    first_expert: int,
    num_experts: int,
    TOP_K: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Program (token, block of columns); unrolled, so that it requests all outputs at once."""
    token = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    is_column_C = column_C < hidden
    sum_C = tl.full([C], 0.0, tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(ids + pair) - first_expert
        is_held = (expert >= 0) & (expert < num_experts)
        is_given_C = tl.where(is_held, column_C, hidden) < hidden
        given_C = tl.load(given + pair * hidden + column_C, mask=is_given_C, other=0.0)
        sum_C += given_C.to(tl.float32) * tl.where(is_held, tl.load(weights + pair), 0.0)
    tl.store(y + token * y_stride + column_C, sum_C.to(y.dtype.element_ty), mask=is_column_C)
