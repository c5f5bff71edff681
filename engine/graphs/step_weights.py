"""The packed weights of a step program: their formats, and where their bytes are from.

A weight that the checkpoint stores quantised is held as it is stored if a native format holds it
exactly; others are dequantised, and packed in the format of `WeightFormats`. Parts of a layer in
several formats are several pieces. Weights that packing rounds are read from a `PackedStore` if it
has them; their tensors are not loaded then. Knows no operations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise

from torch import Tensor

from remora.engine.layers.linear import Linear
from remora.engine.protocols import Fill, PackedStore, nothing_kept
from remora.kernels.cpu.library import Format, Team
from remora.kernels.cpu.packing import PackedWeight, allocate, pack_into
from remora.kernels.cpu.stored_layout import native_format, pack_stored
from remora.kernels.lora import COLUMNS
from remora.kernels.memory import Arena
from remora.kernels.quantised.weight_kinds import WeightKind, join

GATE = "gate_proj"
Names = Mapping[Linear, Sequence[str]]
Columns = Sequence[tuple[Format, int]]  # of the weights of a product: format and number

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormats:
    """Formats of weights that are not multiplied as they are stored.

    layers, head:  of all parts of layers that are not in `parts`, and of the head
    parts:         by the names of parts of layers
    overrides:     (layer, part) -> the format of this one
    """

    layers: Format
    head: Format
    parts: Mapping[str, Format] = field(default_factory=dict)
    overrides: Mapping[tuple[int, str], Format] = field(default_factory=dict)

    def of(self, part: str, name: str = "") -> Format:
        """Return the format of a part of a layer; `name`: of a tensor of the layer."""
        if self.overrides and (found := _LAYER.search(name)):
            layer = int(found[1])
            if (layer, part) in self.overrides:
                return self.overrides[layer, part]
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


@dataclass(frozen=True, slots=True)
class _Source:
    """What a packed weight is made from.

    format:  of the packed weight
    kind:    the weight as it is stored; None = it is in `memory`
    memory:  [n, k], to which the weight may yet have to be loaded
    bias:    [n] or None
    """

    format: Format
    kind: WeightKind | None
    memory: Tensor
    bias: Tensor | None


class Weights:
    """Packs layers, each when it is first asked for.

    weight_bytes:  of the linear layers that are packed
    """

    weight_bytes = 0

    def __init__(
        self,
        team: Team,
        arena: Arena,
        names: Names,
        fill: Fill,
        formats: WeightFormats,
        *,
        head: Linear,
        store: PackedStore = nothing_kept,
    ) -> None:
        """Pack nothing yet.

        arena:    memory of packed weights
        names:    the tensors of linear layers, part by part; those of others must be loaded
        fill:     loads these, and the weights of experts
        formats:  of weights that are not held as they are stored
        head:     the layer that has the format of heads
        store:    of weights that are rounded
        """
        self._team, self._arena, self._fill = team, arena, fill
        self._names, self._formats = names, formats
        self._head, self._store = head, store
        self._packed: dict[Linear, tuple[Piece, ...]] = {}

    def unneeded(self) -> set[str]:
        """Return the tensors of linear layers that the store has packed."""
        found: set[str] = set()
        for linear, names in self._names.items():
            # The embedding reads a tied head's, and only the files tell the runs of quantised ones.
            if linear.owns_weight and self._fill.quantised().isdisjoint(names):
                columns = [
                    (run.format, run.rows.stop - run.rows.start) for run in self._runs(linear)
                ]
                if self._store_for(names, columns).has(_key(names, columns)):
                    found.update(names)
        return found

    def formats(self, *linears: Linear) -> frozenset[Format]:
        """Return the formats of the layers' weights."""
        return frozenset(piece.weight.format for linear in linears for piece in self.pack(linear))

    def pack(self, linear: Linear) -> tuple[Piece, ...]:
        """Pack a layer, unless it is packed; it cannot compute afterwards."""
        if linear not in self._packed:
            runs, names = list(self._runs(linear)), self._names.get(linear, ())
            weight, bias = linear.release()
            sources = [
                _Source(run.format, run.kind, weight[run.rows], _rows_of(bias, run.rows))
                for run in runs
            ]
            gated, spent = GATE in linear.parts, linear.owns_weight
            made = self._pack(names, sources, gated=gated, spent=spent)
            self.weight_bytes += sum(each.num_bytes for each in made)
            firsts = (run.rows.start for run in runs)
            pieces = zip(made, firsts, strict=True)
            self._packed[linear] = tuple(Piece(weight=each, first=first) for each, first in pieces)
        return self._packed[linear]

    def share(self, linear: Linear, pieces: tuple[Piece, ...]) -> None:
        """Let a layer use weights that another program has packed."""
        self._packed[linear] = pieces

    def pack_experts(
        self,
        experts: Sequence[str],
        parts: Sequence[str],
        memory: Tensor,
        biases: Tensor | None,
    ) -> list[PackedWeight]:
        """Pack a weight of each expert, as they are stored if all have one native format.

        experts:  prefixes of the experts' tensors
        parts:    projections that are one weight, of one format
        memory:   [E, outputs of all parts, inputs], to which other weights are loaded
        biases:   [E, outputs of all parts] or None
        """
        plain = self._formats.of(parts[0], experts[0])
        kinds = self._stored_experts(experts, parts, memory)
        sources = [
            _Source(
                plain if kind is None else native_format(kind) or plain,
                kind,
                memory[expert],
                None if biases is None else biases[expert],
            )
            for expert, kind in enumerate(kinds)
        ]
        names = [f"{prefix}{part}.weight" for prefix in experts for part in parts]
        return self._pack(names, sources, gated=GATE in parts, spent=True)

    def _pack(
        self, names: Sequence[str], sources: Sequence[_Source], *, gated: bool, spent: bool
    ) -> list[PackedWeight]:
        """Pack the weights of a product, which is in these tensors."""
        team, arena = self._team, self._arena
        made, plain = [], []
        for source in sources:
            if source.kind is not None:
                made.append(pack_stored(team, source.kind, source.bias, arena, gated=gated))
                continue
            n, k = source.memory.shape
            packed = allocate(team, (n, k), source.bias, source.format, arena, gated=gated)
            made.append(packed)
            plain.append((packed, source.memory))

        def load_and_pack() -> None:
            self._fill(names)
            for packed, memory in plain:
                pack_into(team, packed, memory, spent=spent)

        columns = [(each.format, each.n) for each in made]
        memories = [packed.data for packed, _ in plain]
        store = self._store_for(names, columns)
        if store.fetch(_key(names, columns), memories, load_and_pack):
            self._fill.skip(names)
        return made

    def _store_for(self, names: Sequence[str], columns: Columns) -> PackedStore:
        """Return the store if packing rounds all of these weights, else one that keeps nothing."""
        is_rounded = all(format.is_grouped for format, _ in columns)
        is_plain = bool(names) and self._fill.quantised().isdisjoint(names)
        return self._store if is_rounded and is_plain else nothing_kept

    def _stored_experts(
        self, experts: Sequence[str], parts: Sequence[str], memory: Tensor
    ) -> Sequence[WeightKind | None]:
        """Return each expert's weight as it is stored if all have one native format.

        If not, return None for each, and dequantise to `memory` what is quantised.
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
        return [None] * len(experts)

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
        is_head = linear is self._head
        first = next(iter(names), "")
        formats = [
            self._formats.head if is_head else self._formats.of(part, first)
            for part in linear.parts
        ]
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


def _rows_of(bias: Tensor | None, rows: slice) -> Tensor | None:
    return None if bias is None else bias[rows]


def _key(names: Sequence[str], columns: Columns) -> str:
    """Return a file name for a product; other formats or splits of its parts have another."""
    said = [*names, *(f"{format.name} {n}" for format, n in columns)]
    return f"{names[0]}-{sha256(' '.join(said).encode()).hexdigest()[:16]}"


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
