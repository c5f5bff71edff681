"""Step programs: a list of native operations over weights and buffers.

A thin, typed hand-over to the library: it keeps alive what the operations point to. Knows nothing
of models; engine/graphs builds with it.

Legend: T tokens of a step, R rows of logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import byref

from torch import Tensor

from remora.kernels.cpu.buffers import Batch, PagedCache, Rows, Updates
from remora.kernels.cpu.experts import Choices
from remora.kernels.cpu.library import Activation, Epilogue, Format, Team
from remora.kernels.cpu.norms import NormWeights
from remora.kernels.cpu.packing import PackedWeight
from remora.kernels.cpu.structs import (
    AttentionStruct,
    NormStruct,
    OutputStruct,
    RotationStruct,
    RoutingStruct,
    WeightedStruct,
    WeightStruct,
)
from remora.kernels.memory import is_bf16
from remora.kernels.moe_rules import SILU, Gating, Routing

_NO_NORMS = NormStruct(), NormStruct()


class Program:
    """A list of operations over one batch's arrays. Not thread-safe: one run at a time."""

    _pointer: int | None = None

    def __init__(self, team: Team, batch: Batch) -> None:
        self.team = team
        self.batch = batch
        self._library = team.library
        self._pointer = self._library.program_new(team.pointer, byref(batch.struct()))
        self._kept: list[object] = []
        self._size = 0

    def __del__(self) -> None:
        if self._pointer:
            self._library.program_free(self._pointer)

    def __len__(self) -> int:
        """Return how many operations there are."""
        return self._size

    def run(
        self,
        num_tokens: int,
        num_sequences: int,
        num_logits: int,
        *,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        """Run operations [first, last) on what the batch's arrays hold. Releases the GIL.

        Raises RuntimeError once the team has been closed.
        """
        _ = self.team.pointer
        stop = self._size if last is None else last
        self._library.program_run(self._pointer, first, stop, num_tokens, num_sequences, num_logits)

    def embed(self, table: Tensor, out: Tensor, *, by_position: bool = False) -> None:
        """Look up table [vocab, size] for every token: out [T, >= size] float32.

        by_position:  look up its position instead, and add that to what is there
        """
        self._keep(table, out)
        self._library.add_embed(
            self._pointer,
            table.data_ptr(),
            is_bf16(table),
            table.shape[1],
            by_position,
            out.data_ptr(),
            out.shape[1],
        )

    def norm(
        self,
        x: Tensor,
        weights: NormWeights,
        out: Rows,
        *,
        on_logits: bool = False,
        adds: bool = False,
    ) -> None:
        """Normalise x [T, >= size] float32.

        on_logits:  only of the tokens in `logit_index`: out has R rows
        adds:       to what there is in `out`, which is float32
        """
        if adds and out.format is not Format.F32:
            raise ValueError(f"a norm can be added to F32 rows, not to {out.format.name}")
        self._keep(x, weights, out)
        self._library.add_norm(
            self._pointer,
            on_logits,
            x.data_ptr(),
            x.shape[1],
            byref(weights.struct()),
            out.format,
            byref(out.struct()),
            adds,
        )

    def round(
        self,
        x: Tensor,
        size: int,
        out: Rows,
        *,
        on_logits: bool = False,
        rows_per_token: int = 1,
    ) -> None:
        """Round the first `size` columns of x [T or R, >= size] float32 to the format of `out`."""
        self._keep(x, out)
        self._library.add_round(
            self._pointer,
            on_logits,
            rows_per_token,
            x.data_ptr(),
            x.shape[1],
            size,
            out.format,
            byref(out.struct()),
        )

    def update_embedded(self, updates: Updates, out: Tensor) -> None:
        """Add to what `embed` has written; the updates are those of the table, transposed."""
        if out.shape[1] < updates.slots.bounds[-1]:
            raise ValueError(f"{updates.slots.bounds[-1]} columns are needed; got {out.shape[1]}")
        self._check_rows(updates.shrunk, out)
        self._keep(updates, out)
        self._library.add_update_embedded(
            self._pointer, byref(updates.struct()), out.data_ptr(), out.shape[1]
        )

    def shrink(self, x: Tensor, updates: Updates, *, on_logits: bool = False) -> None:
        """Multiply A with the rows of x [T or R, >= I], float32 or bfloat16, that have an adapter.

        Belongs before `multiply` with the same updates.
        """
        if x.shape[1] < updates.slots.a.shape[2]:
            raise ValueError(f"{updates.slots.a.shape[2]} columns are needed; got {x.shape[1]}")
        self._check_rows(x, updates.shrunk, on_logits=on_logits)
        self._keep(x, updates)
        self._library.add_shrink(
            self._pointer,
            on_logits,
            byref(updates.struct()),
            x.data_ptr(),
            is_bf16(x),
            x.shape[1],
        )

    def rotate_and_store(
        self,
        qkv: Tensor,
        cache: PagedCache,
        layer: int,
        *,
        num_heads: int,
        cosines: Tensor,
        sines: Tensor,
        interleaved: bool = False,
        query_factors: Tensor | None = None,
        norms: tuple[NormWeights, NormWeights] | None = None,
    ) -> None:
        """Normalise and rotate q and k of qkv [T, >= heads * head_dim] in place; store k and v.

        cosines, sines:  [positions, P] float32, of the P pairs at the beginning of each head
        interleaved:     whether neighbours are pairs, or what stands in one place of two halves
        query_factors:   [positions] float32 on queries, or None
        norms:           of all heads of q and of k, or None
        """
        self._keep(qkv, cache, cosines, sines, query_factors, norms)
        query_norm, key_norm = (norm.struct() for norm in norms) if norms else _NO_NORMS
        settings = RotationStruct(
            cache=cache.struct(),
            layer=layer,
            num_heads=num_heads,
            qkv=qkv.data_ptr(),
            stride=qkv.shape[1],
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            num_pairs=cosines.shape[1],
            is_interleaved=interleaved,
            query_factors=None if query_factors is None else query_factors.data_ptr(),
            query_norm=query_norm,
            key_norm=key_norm,
        )
        self._library.add_rotate_and_store(self._pointer, byref(settings))

    def attend(
        self,
        qkv: Tensor,
        cache: PagedCache,
        layer: int,
        out: Tensor,
        *,
        num_heads: int,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> None:
        """Attend with the queries of qkv: out [T, >= num_heads * head_dim] bfloat16 or float32.

        soft_cap:  c, if scores s become c * tanh(s / c)
        sinks:     [num_heads] float32, scores of keys without values
        slopes:    [num_heads] float32, what scores fall by with each position a key lies behind
        """
        self._keep(qkv, cache, out, sinks, slopes)
        attention = AttentionStruct(
            cache=cache.struct(),
            layer=layer,
            num_heads=num_heads,
            window=window or 0,
            scale=scale,
            soft_cap=soft_cap or 0.0,
            sinks=None if sinks is None else sinks.data_ptr(),
            slopes=None if slopes is None else slopes.data_ptr(),
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.shape[1],
            out=out.data_ptr(),
            out_stride=out.shape[1],
            out_is_bf16=is_bf16(out),
        )
        self._library.add_attend(self._pointer, byref(attention))

    def multiply(
        self,
        x: Rows,
        weight: PackedWeight,
        out: Tensor,
        epilogue: Epilogue = Epilogue.STORE,
        *,
        activation: Activation = Activation.LINEAR,
        limit: float = 0.0,
        updates: Updates | None = None,
        on_logits: bool = False,
    ) -> None:
        """Multiply rows with a weight: out [rows, >= weight.out_columns].

        out is float32; with an activation it may be bfloat16.
        activation:  of the product or, with the gated epilogue, of the gate
        limit:       of the activation that caps
        updates:     added to the product, before the epilogue; `shrink` comes before
        """
        self._check_rows(x.values, out, on_logits=on_logits)
        if updates is not None and updates.slots.bounds[-1] != weight.n:
            raise ValueError(
                f"updates of {updates.slots.bounds[-1]} columns do not fit a weight of {weight.n}"
            )
        to = _output(x, weight, out, epilogue, activation, limit)
        self._keep(x, weight, out, updates)
        self._library.add_multiply(
            self._pointer,
            on_logits,
            byref(weight.struct()),
            byref(x.struct()),
            byref(to),
            None if updates is None else byref(updates.struct()),
        )

    def route(
        self, logits: Tensor, routing: Routing, correction: Tensor | None, out: Choices
    ) -> None:
        """Choose experts by logits [T, >= E] float32; see `kernels/moe_routing.py`.

        correction:  [E] float32, added to scores for the choice alone, or None
        """
        self._keep(logits, correction, out)
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
        self._library.add_route(
            self._pointer, byref(settings), logits.data_ptr(), logits.shape[1], byref(out.struct())
        )

    def sort_pairs(self, choices: Choices) -> None:
        """Sort what `route` has chosen by expert."""
        self._keep(choices)
        self._library.add_sort_pairs(self._pointer, byref(choices.struct()))

    def gather(self, x: Rows, out: Rows, choices: Choices) -> None:
        """Copy a token's row of x for each of its sorted pairs: out [T * k, as x has]."""
        if (x.format, x.values.shape[1]) != (out.format, out.values.shape[1]):
            raise ValueError(f"rows {list(x.values.shape)} do not fit {list(out.values.shape)}")
        self._check_rows(x.values)
        self._check_rows(out.values, rows_per_token=choices.top_k)
        self._keep(x, out, choices)
        self._library.add_gather(
            self._pointer, x.format, byref(x.struct()), byref(out.struct()), byref(choices.struct())
        )

    def multiply_experts(
        self,
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
        self._check_rows(x.values, out, rows_per_token=choices.top_k)
        if gating is None:
            to = _output(x, weights[0], out)
        else:  # products are quickest with the activation that they know best
            activation = Activation.SILU if gating == SILU else Activation.GATES
            limit = math.inf if gating.limit is None else gating.limit
            to = _output(x, weights[0], out, Epilogue.GATED, activation, limit)
            to.sharpness, to.offset = gating.sharpness, gating.offset
        self._keep(x, weights, out, choices)
        structs = (WeightStruct * len(weights))(*(each.struct() for each in weights))
        self._library.add_multiply_experts(
            self._pointer, structs, byref(x.struct()), byref(to), byref(choices.struct())
        )

    def add_weighted(
        self, x: Tensor, size: int, weights: Tensor, out: Tensor, choices: Choices | None = None
    ) -> None:
        """Add rows times their weights to the first `size` columns of out [T, >= size] float32.

        choices:  x has a row [T * k, >= size] for each sorted pair; None = one for each token
        weights:  [T, >= k] float32, without choices [T, >= 1]
        """
        top_k = 1 if choices is None else choices.top_k
        self._check_rows(x, rows_per_token=top_k)
        self._check_rows(weights, out)
        self._keep(x, weights, out, choices)
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
        self._library.add_weighted(self._pointer, byref(settings))

    def _check_rows(
        self, *tensors: Tensor, on_logits: bool = False, rows_per_token: int = 1
    ) -> None:
        needed = len(self.batch.logit_index if on_logits else self.batch.token_ids)
        needed *= rows_per_token
        if any(len(tensor) < needed for tensor in tensors):
            given = " and ".join(str(len(tensor)) for tensor in tensors)
            raise ValueError(f"{needed} rows are needed; got {given}")

    def _keep(self, *things: object) -> None:
        """Count one more operation, and hold on to what it has pointers into."""
        self._kept.append(things)
        self._size += 1


def _output(
    x: Rows,
    weight: PackedWeight,
    out: Tensor,
    epilogue: Epilogue = Epilogue.STORE,
    activation: Activation = Activation.LINEAR,
    limit: float = 0.0,
) -> OutputStruct:
    """Describe where a product goes. Raises ValueError where rows, weight and out do not fit."""
    if (
        x.format != weight.format
        or x.values.shape[1] < weight.k
        or out.shape[1] < weight.out_columns
    ):
        raise ValueError(
            f"rows {x.format.name} {list(x.values.shape)} and out {list(out.shape)} do not "
            f"fit a {weight.format.name} weight [{weight.n}, {weight.k}]"
        )
    if is_bf16(out) and activation is Activation.LINEAR:
        raise ValueError("a product without an activation is float32, not bfloat16")
    return OutputStruct(
        epilogue=epilogue,
        activation=activation,
        limit=limit,
        is_bf16=is_bf16(out),
        values=out.data_ptr(),
        stride=out.shape[1],
    )
