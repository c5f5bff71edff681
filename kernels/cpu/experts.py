"""Layers of experts in step programs: who is chosen, and products with each expert's weight.

Legend: T tokens of a step, E experts, k of them for each token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from remora.kernels.cpu.buffers import Rows
from remora.kernels.cpu.library import Activation, Epilogue
from remora.kernels.cpu.packing import PackedWeight
from remora.kernels.cpu.program import Program, output_of
from remora.kernels.cpu.structs import ChoicesStruct, RoutingStruct, WeightedStruct, WeightStruct
from remora.kernels.memory import buffer
from remora.kernels.moe_rules import SILU, Gating, Routing

BLOCK_ROWS = 192  # what a thread multiplies with one panel of a weight at a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """What was chosen in the latest layer, and the pairs of a token and an expert by expert.

    Layers one after the other may share it.

    ids:      [T, k] int32, best first
    weights:  [T, k] float32
    tokens:   [T * k] int32, of the sorted pairs
    places:   [T, k] int32, where a pair stands when sorted
    starts:   [E + 1] int32, where an expert's pairs begin
    blocks:   [B] int32, where each block of at most `BLOCK_ROWS` pairs of one expert begins; then
              -1, as far as a step of so many tokens can have blocks
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
        """Allocate room for so many tokens."""
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
        """Return what the library reads."""
        return ChoicesStruct(
            num_experts=self.num_experts,
            top_k=self.top_k,
            block_rows=BLOCK_ROWS,
            ids=self.ids.data_ptr(),
            weights=self.weights.data_ptr(),
            tokens=self.tokens.data_ptr(),
            places=self.places.data_ptr(),
            starts=self.starts.data_ptr(),
            blocks=self.blocks.data_ptr(),
        )


def route(
    program: Program, logits: Tensor, routing: Routing, correction: Tensor | None, out: Choices
) -> None:
    """Choose experts by logits [T, >= E] float32; see `kernels/moe_routing.py`.

    correction:  [E] float32, added to scores for the choice alone, or None
    """
    settings = RoutingStruct(
        num_experts=out.num_experts,
        top_k=out.top_k,
        is_sigmoid=routing.is_sigmoid,
        by_logits=routing.chooses_by_logits(has_bias=correction is not None),
        is_normalised=routing.is_normalised,
        scaling=routing.scaling,
        num_groups=routing.num_groups,
        top_groups=routing.top_groups,
        group_best=routing.group_best,
        correction=None if correction is None else correction.data_ptr(),
    )
    program.add(
        "route",
        byref(settings),
        logits.data_ptr(),
        logits.shape[1],
        byref(out.struct()),
        keeps=(logits, correction, out),
    )


def sort_pairs(program: Program, choices: Choices) -> None:
    """Sort what `route` has chosen by expert."""
    program.add("sort_pairs", byref(choices.struct()), keeps=(choices,))


def weigh(program: Program, x: Tensor, size: int, out: Rows, choices: Choices) -> None:
    """Write the first `size` columns of x [T, >= size] float32 times a token's one weight to `out`.

    The weights are 1 from then on, until `route` chooses anew.
    """
    if choices.top_k != 1:
        raise ValueError(f"each token has {choices.top_k} weights, not one")
    program.check_rows(x, out.values)
    program.add(
        "weigh",
        x.data_ptr(),
        x.shape[1],
        size,
        out.format,
        byref(out.struct()),
        byref(choices.struct()),
        keeps=(x, out, choices),
    )


def gather(program: Program, x: Rows, out: Rows, choices: Choices) -> None:
    """Copy a token's row of x for each of its sorted pairs: out [T * k, as x has]."""
    if (x.format, x.values.shape[1]) != (out.format, out.values.shape[1]):
        raise ValueError(f"rows {list(x.values.shape)} do not fit {list(out.values.shape)}")
    program.check_rows(x.values)
    program.check_rows(out.values, rows_per_token=choices.top_k)
    program.add(
        "gather",
        x.format,
        byref(x.struct()),
        byref(out.struct()),
        byref(choices.struct()),
        keeps=(x, out, choices),
    )


def multiply_experts(
    program: Program,
    x: Rows,
    weights: Sequence[PackedWeight],
    out: Tensor,
    choices: Choices,
    *,
    gating: Gating | None = None,
) -> None:
    """Multiply rows of sorted pairs [T * k, ...] each with its expert's weight.

    weights:  of all experts, of one shape and format; gated if there is `gating`
    Otherwise as `multiply`.
    """
    if len(weights) != choices.num_experts:
        raise ValueError(f"{len(weights)} weights for {choices.num_experts} experts")
    if len({(each.format, each.n, each.k, each.is_gated) for each in weights}) > 1:
        raise ValueError("the weights of experts are of several shapes")
    program.check_rows(x.values, out, rows_per_token=choices.top_k)
    if gating is None:
        to = output_of(x, weights[0], out)
    else:  # products are quickest with the activation that they know best
        activation = Activation.SILU if gating == SILU else Activation.GATES
        limit = math.inf if gating.limit is None else gating.limit
        to = output_of(x, weights[0], out, Epilogue.GATED, activation, limit)
        to.sharpness, to.offset = gating.sharpness, gating.offset
    structs = (WeightStruct * len(weights))(*(each.struct() for each in weights))
    program.add(
        "multiply_experts",
        structs,
        byref(x.struct()),
        byref(to),
        byref(choices.struct()),
        keeps=(x, weights, out, choices),
    )


def add_weighted(
    program: Program,
    x: Tensor,
    size: int,
    weights: Tensor,
    out: Tensor,
    choices: Choices | None = None,
) -> None:
    """Add rows times their weights to the first `size` columns of out [T, >= size] float32.

    choices:  x has a row [T * k, >= size] for each sorted pair; None = one for each token
    weights:  [T, >= k] float32, without choices [T, >= 1]
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
        places=None if choices is None else choices.places.data_ptr(),
        out=out.data_ptr(),
        out_stride=out.shape[1],
    )
    program.add("weighted", byref(settings), keeps=(x, weights, out, choices))
