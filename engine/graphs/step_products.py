"""Products with linear layers in step programs, and the packing of their weights.

A weight that the checkpoint stores quantised is multiplied as it is stored if a native format holds
it exactly; others are dequantised, and packed in the format of `WeightFormats`. Parts of a layer in
several formats are several products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from remora.engine.graphs.operands import Operand
from remora.engine.layers.linear import Linear
from remora.engine.protocols import Fill
from remora.kernels.cpu.buffers import Rows, Updates
from remora.kernels.cpu.library import Activation, Epilogue, Format
from remora.kernels.cpu.packing import PackedWeight, pack
from remora.kernels.cpu.program import Program
from remora.kernels.cpu.stored_layout import native_format, pack_stored
from remora.kernels.lora import COLUMNS, LowRankSlots
from remora.kernels.memory import Arena, buffer
from remora.kernels.quantised.weight_kinds import WeightKind, join

GATE = "gate_proj"
Names = Mapping[Linear, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormats:
    """Formats of weights that are not multiplied as they are stored.

    layers, head:  of all parts of layers that are not in `parts`, and of the head
    parts:         by the names of parts of layers
    """

    layers: Format
    head: Format
    parts: Mapping[str, Format] = field(default_factory=dict)

    def of(self, part: str) -> Format:
        """Return the format of a part of a layer."""
        return self.parts.get(part, self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A packed weight, and the first output column that it makes."""

    weight: PackedWeight
    first: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive parts of a layer that are one product.

    rows:    of the layer
    kind:    the weight as it is stored; None = the layer's own weight
    format:  of the packed weight
    """

    rows: slice
    kind: WeightKind | None
    format: Format


class Products:
    """Packs linear layers, each when it is first asked for, and adds products with them.

    weight_bytes:  of the weights that are packed
    """

    weight_bytes = 0

    def __init__(
        self,
        program: Program,
        arena: Arena,
        names: Names,
        fill: Fill,
        formats: WeightFormats,
        max_rows: int,
    ) -> None:
        """See `add`.

        names:     the tensors of layers that may be multiplied as they are stored, part by part
        fill:      reads these; other tensors must be loaded
        formats:   of weights that are not multiplied as they are stored
        max_rows:  of an operand
        """
        self._program, self._arena, self._fill = program, arena, fill
        self._names, self._formats, self._max_rows = names, formats, max_rows
        self._packed: dict[Linear, tuple[Piece, ...]] = {}
        self._shrunk: dict[int, Tensor] = {}

    def format_of(self, part: str) -> Format:
        """Return the format of a part of a layer that is not multiplied as it is stored."""
        return self._formats.of(part)

    def formats(self, *linears: Linear) -> frozenset[Format]:
        """Return the formats of the layers' weights."""
        return frozenset(piece.weight.format for linear in linears for piece in self.pack(linear))

    def pack(self, linear: Linear, format: Format | None = None) -> tuple[Piece, ...]:
        """Pack a layer, unless it is packed; it cannot compute afterwards.

        format:  of its weight if that is not multiplied as it is stored; None = that of each part
        """
        if linear not in self._packed:
            runs = list(self._runs(linear, format))
            weight, bias = linear.release()
            self._packed[linear] = tuple(
                Piece(
                    weight=self._pack_run(
                        run,
                        weight[run.rows],
                        None if bias is None else bias[run.rows],
                        gated=GATE in linear.parts,
                        spent=linear.owns_weight,
                    ),
                    first=run.rows.start,
                )
                for run in runs
            )
        return self._packed[linear]

    def add(
        self,
        x: Operand,
        linear: Linear,
        out: Tensor,
        epilogue: Epilogue = Epilogue.STORE,
        *,
        activation: Activation = Activation.LINEAR,
        limit: float = 0.0,
    ) -> None:
        """Add the product with a layer's weight and its adapters, if any.

        x:    written with `formats` of the layer
        out:  [rows, >= outputs], with room for a panel more if the layer has several parts
        """
        program, slots, on_logits = self._program, linear.adapters, x.buffers.on_logits
        if slots is not None:
            program.shrink(x.written.values, self.updates(slots), on_logits=on_logits)
        for piece in self.pack(linear):
            program.multiply(
                self.rounded(x, piece.weight.format),
                piece.weight,
                out[:, piece.first :],
                epilogue,
                activation=activation,
                limit=limit,
                updates=None if slots is None else self.updates(slots, piece.first),
                on_logits=on_logits,
            )

    def rounded(self, x: Operand, format: Format) -> Rows:
        """Return the rows that weights of a format are multiplied with; rounds them once."""
        rows = x.rows(format)
        if rows is not x.written and rows.format not in x.rounded:
            x.rounded.add(rows.format)
            self._program.round(x.written.values, x.size, rows, on_logits=x.buffers.on_logits)
        return rows

    def updates(self, slots: LowRankSlots, first: int = 0) -> Updates:
        """Return the updates of the columns from `first` on; products share the buffer for A x."""
        width = slots.a.shape[1]
        if width not in self._shrunk:
            self._shrunk[width] = buffer((self._max_rows, width), torch.float32)
        return Updates(slots, self._shrunk[width], first)

    def stored_experts(
        self, experts: Sequence[str], parts: Sequence[str], memory: Tensor
    ) -> list[WeightKind]:
        """Return each expert's weight if all have one native format; [] = they are in `memory`.

        experts:  prefixes of the experts' tensors
        parts:    projections that are one weight
        memory:   [E, outputs of all parts, inputs], to which weights are dequantised
        """
        names = [tuple(f"{prefix}{part}.weight" for part in parts) for prefix in experts]
        found = self._fill.kinds([name for of_one in names for name in of_one])
        rows = memory.shape[1] // len(parts)
        whole = [
            join([found[name] for name in of_one])
            for of_one in names
            if all(name in found for name in of_one)
        ]
        kinds = [kind for kind in whole if kind is not None]
        formats = {native_format(kind) for kind in kinds}
        if len(kinds) == len(experts) and len(formats) == 1 and None not in formats:
            return kinds
        for expert, of_one in enumerate(names):
            for part, name in enumerate(of_one):
                if name in found:
                    plain = found.pop(name).dequantised(memory.dtype)
                    memory[expert, part * rows : (part + 1) * rows] = plain
        return []

    def _runs(self, linear: Linear, format: Format | None) -> Iterator[_Run]:
        """Yield the products that make a layer; dequantise the weights that are not held as stored.

        Columns of updates lie in blocks, at whose bounds a product must begin.
        """
        ends = [0]
        for part in linear.parts.values():
            ends.append(ends[-1] + len(part.held))
        rows = [slice(*pair) for pair in pairwise(ends)]
        names = self._names.get(linear, ())
        found = self._fill.kinds(names)
        kinds = [found.get(name) for name in names] or [None] * len(rows)
        formats = [self.format_of(part) if format is None else format for part in linear.parts]
        runs = list(_joined(rows, kinds, formats))
        has_blocks = all(run.rows.start % COLUMNS == 0 for run in runs)
        is_one = GATE in linear.parts or (linear.adapters is not None and not has_blocks)
        if len(runs) > 1 and is_one:
            one = formats[0] if len(set(formats)) == 1 else self._formats.layers
            runs = [_Run(slice(0, ends[-1]), None, one)]
        for run in runs:
            for of_part, kind in zip(rows, kinds, strict=True):
                is_inside = run.rows.start <= of_part.start and of_part.stop <= run.rows.stop
                if is_inside and kind is not None and (run.kind is None or not linear.owns_weight):
                    linear.weight[of_part] = kind.dequantised(linear.weight.dtype)
            yield run

    def _pack_run(
        self,
        run: _Run,
        weight: Tensor,
        bias: Tensor | None,
        *,
        gated: bool,
        spent: bool,
    ) -> PackedWeight:
        team = self._program.team
        if run.kind is not None:
            packed = pack_stored(team, run.kind, bias, self._arena, gated=gated)
        else:
            packed = pack(team, weight, bias, run.format, self._arena, gated=gated, spent=spent)
        self.weight_bytes += packed.num_bytes
        return packed


def _joined(
    rows: Sequence[slice], kinds: Sequence[WeightKind | None], formats: Sequence[Format]
) -> Iterator[_Run]:
    """Yield runs of parts whose weights can be one: plain in one format, or joined in a native one.

    formats:  of the parts if they are not held as stored
    """
    last: _Run | None = None
    for part, kind, plain in zip(rows, kinds, formats, strict=True):
        native = None if kind is None else native_format(kind)
        run = _Run(part, None, plain) if native is None else _Run(part, kind, native)
        both = None if last is None else _join_runs(last, run)
        if last is not None and both is None:
            yield last
        last = run if both is None else both
    assert last is not None
    yield last


def _join_runs(a: _Run, b: _Run) -> _Run | None:
    """Return two runs as one; None = they are two products."""
    rows = slice(a.rows.start, b.rows.stop)
    if a.format is not b.format:
        return None
    if a.kind is None and b.kind is None:
        return _Run(rows, None, a.format)
    if a.kind is None or b.kind is None:
        return None
    kind = join((a.kind, b.kind))
    return None if kind is None else _Run(rows, kind, a.format)
