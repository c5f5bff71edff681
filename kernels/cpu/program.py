"""Step programs: lists of native operations over weights and buffers.

A thin, typed layer over the library that keeps alive the memory its operations point to. Knows
nothing of models; `engine/graphs` builds programs with it.

Legend: T tokens of a step, R rows of logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import byref, c_int

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
    argument_of,
)
from remora.kernels.memory import address_of, is_bf16

_NO_NORMS = NormStruct(), NormStruct()


class Program:
    """Operations over one batch's arrays. Not thread-safe: one run at a time."""

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
        """Return the number of operations."""
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
        """Run operations [first, last) on the batch's arrays. Releases the GIL.

        Raises RuntimeError after the team is closed.
        """
        _ = self.team.pointer
        stop = self._size if last is None else last
        self._library.program_run(self._pointer, first, stop, num_tokens, num_sequences, num_logits)

    def num_chunks(self, num_tokens: int, num_sequences: int, num_logits: int) -> list[int]:
        """Return how many chunks the team would divide each operation of this step into.

        Reads the batch's arrays; computes nothing, and touches neither weights nor buffers.
        """
        _ = self.team.pointer
        counts = (c_int * self._size)()
        self._library.program_chunks(self._pointer, num_tokens, num_sequences, num_logits, counts)
        return list(counts)

    def embed(self, table: Tensor, out: Tensor, *, by_position: bool = False) -> None:
        """Look up every token in a table [vocab, size]: out [T, >= size] float32.

        by_position:  look up the position instead of the id, and add the result to `out`
        """
        format = Format.of(table.dtype)
        self.add("embed", table, format, table.shape[1], by_position, out, out.shape[1])

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

        on_logits:  only the tokens in `logit_index`; out has R rows
        adds:       add the result to `out`, which is float32, instead of overwriting it
        """
        if adds and out.format is not Format.F32:
            raise ValueError(f"a norm cannot be added to {out.format.name} rows, only to F32")
        self.add("norm", on_logits, x, x.shape[1], weights, out.format, out, adds)

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
        self.add("round", on_logits, rows_per_token, x, x.shape[1], size, out.format, out)

    def update_embedded(self, updates: Updates, out: Tensor) -> None:
        """Add updates of the (transposed) embedding table to the output of `embed`."""
        if out.shape[1] < updates.slots.bounds[-1]:
            raise ValueError(
                f"out has {out.shape[1]} columns; {updates.slots.bounds[-1]} are needed"
            )
        self.check_rows(updates.shrunk, out)
        self.add("update_embedded", updates, out, out.shape[1])

    def shrink(self, x: Tensor, updates: Updates, *, on_logits: bool = False) -> None:
        """Multiply the rows of x [T or R, >= I] that have an adapter with its A.

        x is float32 or bfloat16. Must precede `multiply` with the same updates.
        """
        if x.shape[1] < updates.slots.a.shape[2]:
            raise ValueError(f"x has {x.shape[1]} columns; {updates.slots.a.shape[2]} are needed")
        self.check_rows(x, updates.shrunk, on_logits=on_logits)
        self.add("shrink", on_logits, updates, x, is_bf16(x), x.shape[1])

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

        cosines, sines:   [positions, P] float32, angles of P pairs of each head
        first:            first rotary element of each head
        interleaved:      pairs are neighbours; otherwise elements i and i + P
        query_factors:    [positions] float32 factors of queries, or None
        norms:            of the heads of q and of k, or None
        keys_are_values:  k is also v; qkv has no v
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
            query_factors=address_of(query_factors),
            query_norm=query_norm,
            key_norm=key_norm,
            keys_are_values=keys_are_values,
        )
        keeps = (qkv, cache, cosines, sines, query_factors, norms)
        self.add("rotate_and_store", settings, keeps=keeps)

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

        window:    number of latest positions that a query sees; None = all
        chunked:   a query sees the positions since the last multiple of `window` instead
        soft_cap:  c of scores c * tanh(s / c); None = no cap
        sinks:     [num_heads] float32, scores of keys without values
        slopes:    [num_heads] float32, decrease of the score per position of distance (ALiBi)
        """
        attention = AttentionStruct(
            cache=cache.struct(),
            layer=layer,
            num_heads=num_heads,
            window=window or 0,
            is_chunked=chunked,
            scale=scale,
            soft_cap=soft_cap or 0.0,
            sinks=address_of(sinks),
            slopes=address_of(slopes),
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.shape[1],
            out=out.data_ptr(),
            out_stride=out.shape[1],
            out_is_bf16=is_bf16(out),
        )
        self.add("attend", attention, keeps=(qkv, cache, out, sinks, slopes))

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

        out is float32; with an activation it may be bfloat16. It may be columns of a wider buffer.
        activation:  of the product or, with the gated epilogue, of the gate
        limit:       cap of `Activation.CAP`
        updates:     added to the product before the epilogue; requires `shrink` before
        """
        self.check_rows(x.values, out, on_logits=on_logits)
        if updates is not None and not updates.covers(weight.n):
            raise ValueError(
                f"updates have {updates.slots.bounds[-1]} columns, the weight {weight.n} from "
                f"column {updates.first} on"
            )
        to = output_of(x, weight, out, epilogue, activation, limit)
        self.add("multiply", on_logits, weight, x, to, updates, keeps=(out,))

    def check_rows(
        self, *tensors: Tensor, on_logits: bool = False, rows_per_token: int = 1
    ) -> None:
        """Raise ValueError for a tensor with fewer rows than the largest step needs."""
        needed = len(self.batch.logit_index if on_logits else self.batch.token_ids)
        needed *= rows_per_token
        if any(len(tensor) < needed for tensor in tensors):
            given = " and ".join(str(len(tensor)) for tensor in tensors)
            raise ValueError(f"tensors have {given} rows; {needed} are needed")

    def add(self, operation: str, *arguments: object, keeps: Iterable[object] = ()) -> None:
        """Add an operation by its name in the library, and keep alive the memory it points to.

        arguments:  numbers; tensors, structures and objects with a `struct`, passed as addresses
        keeps:      tensors and objects to which structures among the arguments point
        """
        add = getattr(self._library, f"add_{operation}")
        add(self._pointer, *map(argument_of, arguments))
        self._kept += [arguments, keeps]
        self._size += 1


def output_of(
    x: Rows,
    weight: PackedWeight,
    out: Tensor,
    epilogue: Epilogue = Epilogue.STORE,
    activation: Activation = Activation.LINEAR,
    limit: float = 0.0,
) -> OutputStruct:
    """Describe a product's output. Raises ValueError unless rows, weight and out fit together."""
    if (
        x.format != weight.format.of_rows
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
        stride=out.stride(0),
    )
