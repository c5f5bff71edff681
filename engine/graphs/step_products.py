"""Products with linear layers in step programs, and the packing of their weights.

A weight that the checkpoint stores quantised is multiplied as it is stored if a native format holds
it exactly; it is dequantised otherwise. Parts of a layer in several formats are several products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
class Piece:
    """A packed weight, and the first output column that it makes."""

    weight: PackedWeight
    first: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive parts of a layer that are one product: as stored, or of the layer's own weight.

    rows:  of the layer
    """

    rows: slice
    kind: WeightKind | None


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
        format: Format,
        max_rows: int,
    ) -> None:
        """See `add`.

        names:     the tensors of layers that may be multiplied as they are stored, part by part
        fill:      reads these; other tensors must be loaded
        format:    of weights that are not multiplied as they are stored
        max_rows:  of an operand
        """
        self._program, self._arena, self._fill = program, arena, fill
        self._names, self._format, self._max_rows = names, format, max_rows
        self._packed: dict[Linear, tuple[Piece, ...]] = {}
        self._shrunk: dict[int, Tensor] = {}

    def formats(self, *linears: Linear) -> frozenset[Format]:
        """Return the formats of the layers' weights."""
        return frozenset(piece.weight.format for linear in linears for piece in self.pack(linear))

    def pack(self, linear: Linear, format: Format | None = None) -> tuple[Piece, ...]:
        """Pack a layer, unless it is packed; it cannot compute afterwards.

        format:  of its weight if that is not multiplied as it is stored; None = the usual one
        """
        if linear not in self._packed:
            runs = list(self._runs(linear))
            weight, bias = linear.release()
            self._packed[linear] = tuple(
                Piece(
                    weight=self._pack_run(
                        run,
                        weight[run.rows],
                        None if bias is None else bias[run.rows],
                        self._format if format is None else format,
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

    def _runs(self, linear: Linear) -> Iterator[_Run]:
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
        runs = list(_joined(rows, kinds))
        has_blocks = all(run.rows.start % COLUMNS == 0 for run in runs)
        is_one = GATE in linear.parts or (linear.adapters is not None and not has_blocks)
        if len(runs) > 1 and is_one:
            runs = [_Run(slice(0, ends[-1]), None)]
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
        format: Format,
        *,
        gated: bool,
        spent: bool,
    ) -> PackedWeight:
        team = self._program.team
        if run.kind is not None:
            packed = pack_stored(team, run.kind, bias, self._arena, gated=gated)
        else:
            packed = pack(team, weight, bias, format, self._arena, gated=gated, spent=spent)
        self.weight_bytes += packed.num_bytes
        return packed


def _joined(rows: Sequence[slice], kinds: Sequence[WeightKind | None]) -> Iterator[_Run]:
    """Yield runs of parts whose weights can be one: all plain, or joined in one native format."""
    last, last_format = _Run(slice(0, 0), None), None
    for part, kind in zip(rows, kinds, strict=True):
        format = None if kind is None else native_format(kind)
        held = None if format is None else kind
        is_like = last.rows.stop > 0 and format is last_format
        joined = held
        if is_like and last.kind is not None and held is not None:
            joined = join((last.kind, held))
            is_like = joined is not None
        if is_like:
            last = _Run(slice(last.rows.start, part.stop), joined)
            continue
        if last.rows.stop > 0:
            yield last
        last, last_format = _Run(part, held), format
    yield last
