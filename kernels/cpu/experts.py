"""Expert layers in step programs: routing, and products with each expert's weight.

Legend: T tokens of a step, E experts, k of them for each token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from remora.kernels.cpu.buffers import Rows
from remora.kernels.cpu.library import Activation, Epilogue
from remora.kernels.cpu.packing import PackedWeight
from remora.kernels.cpu.program import Program, output_of
from remora.kernels.cpu.structs import (
    ChoicesStruct,
    RoutingStruct,
    WeightedStruct,
    WeightStruct,
    struct_of,
)
from remora.kernels.memory import address_of, buffer
from remora.kernels.moe_rules import SILU, Gating, Routing

BLOCK_ROWS = 192  # rows that a thread multiplies with one panel of a weight at a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """Routing of the latest layer: chosen experts, and token-expert pairs sorted by expert.

    Consecutive layers may share it.

    ids:      [T, k] int32, best first
    weights:  [T, k] float32
    tokens:   [T * k] int32, tokens of the sorted pairs
    places:   [T, k] int32, index of each pair in the sorted order
    starts:   [E + 1] int32, first sorted pair of each expert
    blocks:   [B] int32, first pair of each block of at most `BLOCK_ROWS` pairs of one expert; -1
              after the last block. B is the largest number of blocks for T tokens.
    """

    num_experts: int
    top_k: int
    ids: Tensor
    weights: Tensor
    tokens: Tensor
    places: Tensor
    starts: Tensor
    blocks: Tensor

    @staticmethod
    def allocate(*, num_tokens: int, num_experts: int, top_k: int) -> Choices:
        """Allocate arrays for at most `num_tokens` tokens."""
        num_pairs = num_tokens * top_k
        num_blocks = num_pairs // BLOCK_ROWS + min(num_pairs, num_experts)
        return Choices(
            num_experts=num_experts,
            top_k=top_k,
            ids=buffer((num_tokens, top_k), torch.int32),
            weights=buffer((num_tokens, top_k), torch.float32),
            tokens=buffer((num_pairs,), torch.int32),
            places=buffer((num_tokens, top_k), torch.int32),
            starts=buffer((num_experts + 1,), torch.int32),
            blocks=buffer((num_blocks,), torch.int32),
        )

    def struct(self) -> ChoicesStruct:
        """Return the library's view of it."""
        return struct_of(ChoicesStruct, self, block_rows=BLOCK_ROWS)


def route(
    program: Program, logits: Tensor, routing: Routing, correction: Tensor | None, out: Choices
) -> None:
    """Choose experts by logits [T, >= E] float32; see `kernels/moe_routing.py`.

    correction:  [E] float32, added to scores for the choice but not to weights, or None
    """
    settings = struct_of(
        RoutingStruct,
        routing,
        num_experts=out.num_experts,
        top_k=out.top_k,
        by_logits=routing.chooses_by_logits(has_bias=correction is not None),
        correction=address_of(correction),
    )
    program.add("route", settings, logits, logits.shape[1], out, keeps=(correction,))


def sort_pairs(program: Program, choices: Choices) -> None:
    """Sort the token-expert pairs of `route` by expert."""
    program.add("sort_pairs", choices)


def scale_tokens(program: Program, x: Tensor, size: int, out: Rows, choices: Choices) -> None:
    """Write the first `size` columns of x [T, >= size] float32, times the token's weight, to `out`.

    Requires one expert per token. Sets the weights to 1, until the next `route`.
    """
    if choices.top_k != 1:
        raise ValueError(f"each token has {choices.top_k} experts; only one is supported here")
    program.check_rows(x, out.values)
    program.add("weigh", x, x.shape[1], size, out.format, out, choices)


def gather(program: Program, x: Rows, out: Rows, choices: Choices) -> None:
    """Copy the token's row of x to `out` for every sorted pair; out has T * k rows."""
    if (x.format, x.values.shape[1]) != (out.format, out.values.shape[1]):
        raise ValueError(f"rows {list(x.values.shape)} do not fit {list(out.values.shape)}")
    program.check_rows(x.values)
    program.check_rows(out.values, rows_per_token=choices.top_k)
    program.add("gather", x.format, x, out, choices)


def multiply_experts(
    program: Program,
    x: Rows,
    weights: Sequence[PackedWeight],
    out: Tensor,
    choices: Choices,
    *,
    gating: Gating | None = None,
) -> None:
    """Multiply rows of sorted pairs [T * k, ...] with the weights of their experts.

    weights:  one per expert, all of one shape and format; gated weights if `gating` is set
    Otherwise as `Program.multiply`.
    """
    if len(weights) != choices.num_experts:
        raise ValueError(f"{len(weights)} weights for {choices.num_experts} experts")
    if len({(each.format, each.n, each.k, each.is_gated) for each in weights}) > 1:
        raise ValueError("expert weights differ in shape or format")
    program.check_rows(x.values, out, rows_per_token=choices.top_k)
    if gating is None:
        to = output_of(x, weights[0], out)
    else:  # SILU has a faster code path than GATES
        activation = Activation.SILU if gating == SILU else Activation.GATES
        limit = math.inf if gating.limit is None else gating.limit
        to = output_of(x, weights[0], out, Epilogue.GATED, activation, limit)
        to.sharpness, to.offset = gating.sharpness, gating.offset
    structs = (WeightStruct * len(weights))(*(each.struct() for each in weights))
    program.add("multiply_experts", structs, x, to, choices, keeps=(weights, out))


def add_weighted(
    program: Program,
    x: Tensor,
    size: int,
    weights: Tensor,
    out: Tensor,
    choices: Choices | None = None,
) -> None:
    """Add weighted rows to the first `size` columns of out [T, >= size] float32.

    choices:  x is [T * k, >= size], a row for each sorted pair; None = x has a row for each token
    weights:  [T, >= k] float32; without choices [T, >= 1]
    """
    top_k = 1 if choices is None else choices.top_k
    program.check_rows(x, rows_per_token=top_k)
    program.check_rows(weights, out)
    settings = WeightedStruct(
        x=x.data_ptr(),
        x_stride=x.shape[1],
        size=size,
        weights=weights.data_ptr(),
        weights_stride=weights.shape[1],
        top_k=top_k,
        places=address_of(None if choices is None else choices.places),
        out=out.data_ptr(),
        out_stride=out.shape[1],
    )
    program.add("weighted", settings, keeps=(x, weights, out, choices))
