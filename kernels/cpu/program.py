"""Step programs: a list of native operations over weights and buffers.

A thin, typed hand-over to the library: it keeps alive what the operations point to. Knows nothing
of models; engine/graphs builds with it.

Legend: T tokens of a step, R rows of logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import byref

from torch import Tensor

from remora.kernels.cpu.buffers import Batch, PagedCache, Rows, Updates
from remora.kernels.cpu.library import Activation, Epilogue, Format, Team
from remora.kernels.cpu.norms import NormWeights
from remora.kernels.cpu.packing import PackedWeight
from remora.kernels.cpu.structs import (
    AttentionStruct,
    NormStruct,
    OutputStruct,
    RotationStruct,
)
from remora.kernels.memory import is_bf16

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
        self.add(
            "embed",
            table.data_ptr(),
            is_bf16(table),
            table.shape[1],
            by_position,
            out.data_ptr(),
            out.shape[1],
            keeps=(table, out),
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
        self.add(
            "norm",
            on_logits,
            x.data_ptr(),
            x.shape[1],
            byref(weights.struct()),
            out.format,
            byref(out.struct()),
            adds,
            keeps=(x, weights, out),
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
        self.add(
            "round",
            on_logits,
            rows_per_token,
            x.data_ptr(),
            x.shape[1],
            size,
            out.format,
            byref(out.struct()),
            keeps=(x, out),
        )

    def update_embedded(self, updates: Updates, out: Tensor) -> None:
        """Add to what `embed` has written; the updates are those of the table, transposed."""
        if out.shape[1] < updates.slots.bounds[-1]:
            raise ValueError(f"{updates.slots.bounds[-1]} columns are needed; got {out.shape[1]}")
        self.check_rows(updates.shrunk, out)
        self.add(
            "update_embedded",
            byref(updates.struct()),
            out.data_ptr(),
            out.shape[1],
            keeps=(updates, out),
        )

    def shrink(self, x: Tensor, updates: Updates, *, on_logits: bool = False) -> None:
        """Multiply A with the rows of x [T or R, >= I], float32 or bfloat16, that have an adapter.

        Belongs before `multiply` with the same updates.
        """
        if x.shape[1] < updates.slots.a.shape[2]:
            raise ValueError(f"{updates.slots.a.shape[2]} columns are needed; got {x.shape[1]}")
        self.check_rows(x, updates.shrunk, on_logits=on_logits)
        self.add(
            "shrink",
            on_logits,
            byref(updates.struct()),
            x.data_ptr(),
            is_bf16(x),
            x.shape[1],
            keeps=(x, updates),
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
        first: int = 0,
        interleaved: bool = False,
        query_factors: Tensor | None = None,
        norms: tuple[NormWeights, NormWeights] | None = None,
        keys_are_values: bool = False,
    ) -> None:
        """Normalise and rotate q and k of qkv [T, >= heads * head_dim] in place; store k and v.

        cosines, sines:  [positions, P] float32, of P pairs of each head
        first:           element of each head at which those begin
        interleaved:     whether neighbours are pairs, or what stands in one place of two halves
        query_factors:   [positions] float32 on queries, or None
        norms:           of all heads of q and of k, or None
        keys_are_values: what is kept of a token is both; there is no v
        """
        query_norm, key_norm = (norm.struct() for norm in norms) if norms else _NO_NORMS
        settings = RotationStruct(
            cache=cache.struct(),
            layer=layer,
            num_heads=num_heads,
            qkv=qkv.data_ptr(),
            stride=qkv.shape[1],
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            first=first,
            num_pairs=cosines.shape[1],
            is_interleaved=interleaved,
            query_factors=None if query_factors is None else query_factors.data_ptr(),
            query_norm=query_norm,
            key_norm=key_norm,
            keys_are_values=keys_are_values,
        )
        self.add(
            "rotate_and_store",
            byref(settings),
            keeps=(qkv, cache, cosines, sines, query_factors, norms),
        )

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
        chunked: bool = False,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> None:
        """Attend with the queries of qkv: out [T, >= num_heads * head_dim] bfloat16 or float32.

        window:    positions that a query sees; None = all
        chunked:   whether it sees those from the latest multiple of the window on instead
        soft_cap:  c, if scores s become c * tanh(s / c)
        sinks:     [num_heads] float32, scores of keys without values
        slopes:    [num_heads] float32, what scores fall by with each position a key lies behind
        """
        attention = AttentionStruct(
            cache=cache.struct(),
            layer=layer,
            num_heads=num_heads,
            window=window or 0,
            is_chunked=chunked,
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
        self.add("attend", byref(attention), keeps=(qkv, cache, out, sinks, slopes))

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
        self.check_rows(x.values, out, on_logits=on_logits)
        if updates is not None and updates.slots.bounds[-1] != weight.n:
            raise ValueError(
                f"updates of {updates.slots.bounds[-1]} columns do not fit a weight of {weight.n}"
            )
        to = output_of(x, weight, out, epilogue, activation, limit)
        self.add(
            "multiply",
            on_logits,
            byref(weight.struct()),
            byref(x.struct()),
            byref(to),
            None if updates is None else byref(updates.struct()),
            keeps=(x, weight, out, updates),
        )

    def check_rows(
        self, *tensors: Tensor, on_logits: bool = False, rows_per_token: int = 1
    ) -> None:
        """Raise ValueError unless tensors have a row for each that a step may have."""
        needed = len(self.batch.logit_index if on_logits else self.batch.token_ids)
        needed *= rows_per_token
        if any(len(tensor) < needed for tensor in tensors):
            given = " and ".join(str(len(tensor)) for tensor in tensors)
            raise ValueError(f"{needed} rows are needed; got {given}")

    def add(self, operation: str, *arguments: object, keeps: Iterable[object]) -> None:
        """Add an operation by its name in the library, and hold on to what it has pointers into."""
        getattr(self._library, f"add_{operation}")(self._pointer, *arguments)
        self._kept.append(keeps)
        self._size += 1


def output_of(
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
