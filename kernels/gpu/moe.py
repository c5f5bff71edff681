"""Triton kernels of `kernels/moe.py`.

Token-expert pairs are sorted into blocks (`moe_align.py`). A program multiplies a block of rows
with some columns of its expert's weight, transposed as in `products.py`. The first product computes
gates and ups of the same columns together and writes the gated result; the second writes each
pair's output to a row, and a last launch sums these in order.

Legend, and suffixes of blocks: R rows of a block, C columns (outputs), K inputs of a step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.gpu.arch import Arch, arch_of, has_fp8
from remora.kernels.gpu.groups import constants_of, operands_of, weight_bits
from remora.kernels.gpu.moe_align import Blocks, align
from remora.kernels.gpu.moe_sums import finished, fp8_sums, group_sums, plain_sums
from remora.kernels.gpu.products import (
    GROUP,
    TileLaunch,
    launch_for,
    table,
    tile_of,
)
from remora.kernels.gpu.quantise import quantise_groups
from remora.kernels.moe_rules import SILU, Gating
from remora.kernels.moe_weights import Biases, ExpertWeight, shape_of, values_of
from remora.kernels.quantised.quant_formats import BLOCK, MAX_HALF, Fp8BlockWeight, GroupWeight

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
# Weights in groups are decoded in registers; a block of inputs is a run of at most 128.
_FEW_COLUMNS = TileLaunch(rows=64, columns=32, inputs=2 * MAX_HALF, num_warps=8, num_stages=4)
GROUP_LAUNCHES = table(
    TileLaunch(rows=16, columns=64, inputs=2 * MAX_HALF, num_warps=4, num_stages=5),
    TileLaunch(rows=32, columns=64, inputs=2 * MAX_HALF, num_warps=4, num_stages=4),
    TileLaunch(rows=64, columns=64, inputs=2 * MAX_HALF, num_warps=8, num_stages=5),
    but={
        Arch.AMPERE: (_FEW_COLUMNS,),
        Arch.SMALL: (_FEW_COLUMNS,),
        Arch.BLACKWELL: (
            TileLaunch(rows=32, columns=64, inputs=2 * MAX_HALF, num_warps=8, num_stages=4),
        ),
    },
)
# float32
WIDE_LAUNCH = TileLaunch(rows=16, columns=32, inputs=32, num_warps=4, num_stages=2)
WIDE_GROUP_LAUNCH = TileLaunch(rows=16, columns=16, inputs=128, num_warps=8, num_stages=2)
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
    experts, wide, hidden = shape_of(gate_up)
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
        num_warps=8,
        num_stages=1,
        enable_fp_fusion=True,
    )


def launch_of(x: Tensor, pairs: int, weight: ExpertWeight) -> TileLaunch:
    """Return the launch whose blocks hold 1.25 times the average pairs of an expert."""
    is_grouped = isinstance(weight, GroupWeight)
    if x.itemsize == 4 and not isinstance(weight, Fp8BlockWeight):
        return WIDE_GROUP_LAUNCH if is_grouped else WIDE_LAUNCH
    launches = GROUP_LAUNCHES if is_grouped else LAUNCHES
    if isinstance(weight, Fp8BlockWeight):
        launches = FP8_LAUNCHES
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
    w, scales, bits = values_of(weight), None, values_of(weight).itemsize * 8
    operands: tuple[Tensor | None, ...] = (None, None, None)
    constants: dict[str, Any] = {"FORMAT": "plain", "K": launch.inputs, "GROUP_SIZE": 0}
    if isinstance(weight, Fp8BlockWeight):
        x, scales = quantise_groups(x)
        operands, constants["FORMAT"] = (weight.scales, None, None), "fp8"
    elif isinstance(weight, GroupWeight):
        operands, constants, bits = operands_of(weight), constants_of(weight), weight_bits(weight)
    columns, inputs = y.shape[1], x.shape[1]
    tiles = len(blocks.experts) * triton.cdiv(columns, launch.columns)
    experts_kernel[(tiles,)](
        x,
        scales,
        w,
        *operands,
        blocks.pairs,
        blocks.experts,
        bias,
        y,
        len(blocks.experts),
        columns,
        inputs,
        x.stride(0),
        w.shape[2],
        0 if operands[0] is None else operands[0].shape[1],
        len(x),
        ids.numel(),
        ids.shape[1],
        IS_GATED=is_gated,
        SHARPNESS=through.sharpness,
        OFFSET=through.offset,
        LIMIT=through.limit,
        R=launch.rows,
        C=launch.columns,
        GROUP=GROUP,
        IS_EVEN=inputs % constants["K"] == 0,
        **constants,
        **launch.options(arch_of(x.device), x.itemsize, bits / 8 * (2 if is_gated else 1)),
    )


@triton.jit(do_not_specialize=["num_blocks", "num_rows", "num_pairs"])
def experts_kernel(
    x: tl.tensor,
    x_scales: tl.tensor | None,
    w: tl.tensor,
    w_scales: tl.tensor | None,
    zeros: tl.tensor | None,
    factors: tl.tensor | None,
    sorted_pairs: tl.tensor,
    block_experts: tl.tensor,
    bias: tl.tensor | None,
    y: tl.tensor,
    num_blocks: int,
    columns: int,
    inputs: int,
    x_stride: int,
    w_stride: int,
    groups: int,
    num_rows: int,
    num_pairs: int,
    top_k: int,
    IS_GATED: tl.constexpr,
    SHARPNESS: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
    FORMAT: tl.constexpr,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
) -> None:
    """Program (tile); FORMAT is "plain", "fp8" in blocks, or one of groups."""
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
    of_expert_C = expert * parts * columns + column_C
    w_C = w + of_expert_C * w_stride
    up_C = w + (of_expert_C + columns) * w_stride
    if FORMAT == "plain":
        sum_CR, up_CR = plain_sums(x_R, w_C, up_C, inputs, IS_GATED, K, IS_EVEN)
    elif FORMAT == "fp8":
        at = (expert * tl.cdiv(parts * columns, K) + from_column // K) * tl.cdiv(inputs, K)
        up_at = at + columns // K * tl.cdiv(inputs, K)
        sum_CR, up_CR = fp8_sums(
            *(x_R, x_scales + from_R, w_C, up_C, w_scales + at, w_scales + up_at),
            *(num_rows, inputs, IS_GATED, K, IS_EVEN),
        )
    else:
        at_C = expert * groups * parts * columns + column_C
        sum_CR, up_CR = group_sums(
            *(x_R, w_C, up_C, w_scales, zeros, at_C, columns, inputs, groups),
            *(IS_GATED, FORMAT, K, GROUP_SIZE, IS_EVEN),
        )
    sum_CR, up_CR = finished(sum_CR, up_CR, factors, bias, of_expert_C, columns, IS_GATED)
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
