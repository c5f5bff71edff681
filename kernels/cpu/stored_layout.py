"""Arranges quantised weights in the panels of native products; codes and scales stay as stored.

`src/grouped.h` describes the layouts. Each native format that stores a kind exactly has an entry in
`_LAYOUTS`. Knows kinds of weights; knows no checkpoints and no rounding, which is `pack.cpp`'s.

Legend: C columns of whole panels, k inputs padded to whole blocks, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from remora.kernels.cpu.library import LANES, PANEL, Format, Library, Team
from remora.kernels.cpu.packing import PackedWeight, packed_bias, padded_n
from remora.kernels.memory import Arena
from remora.kernels.quantised.block_weight import BLOCK_TYPES, BlockWeight
from remora.kernels.quantised.weight_kinds import (
    Float4Weight,
    Float8Weight,
    IntWeight,
    TableWeight,
    WeightKind,
)

COLUMNS_AT_ONCE = 16 * PANEL  # arranged at a time, so that temporaries are small
FLOAT8_BLOCK, TABLE_BLOCK = 128, 64  # inputs that share a scale in the native formats


@dataclass(frozen=True, slots=True)
class Layout:
    """How a native format stores a kind.

    holds:    whether the format stores this weight exactly, but for tables, which are in bfloat16
    arrange:  returns the panels [panels, *, bytes] uint8 of the weight's rows [C], of which -1 is
              padding
    """

    holds: Callable[[WeightKind], bool]
    arrange: Callable[[WeightKind, Tensor, Library], Tensor]


def native_format(kind: WeightKind) -> Format | None:
    """Return the native format that stores a weight exactly; None if there is none."""
    return _find(kind)[0]


def _find(kind: WeightKind) -> tuple[Format, Layout] | tuple[None, None]:
    return next((pair for pair in _LAYOUTS if pair[1].holds(kind)), (None, None))


def pack_stored(
    team: Team, kind: WeightKind, bias: Tensor | None, arena: Arena, *, gated: bool = False
) -> PackedWeight:
    """Pack a weight [n, k] that has a `native_format`.

    bias:   [n] or None
    arena:  allocator of the packed weight's memory
    gated:  the first n / 2 rows are gates, the others ups
    """
    format, layout = _find(kind)
    if format is None or layout is None:
        raise ValueError(f"no native format stores {type(kind).__name__} {list(kind.shape)}")
    n, k = kind.shape
    num_panels = -(-padded_n(n, gated) // PANEL)
    packed = PackedWeight(
        format=format,
        n=n,
        k=k,
        is_gated=gated,
        data=arena.take(num_panels * team.library.panel_bytes(format, k)),
        bias=None if bias is None else packed_bias(bias, gated),
    )
    panels = packed.data.view(num_panels, -1)
    rows = _rows_of_columns(n, num_panels, gated)
    step = COLUMNS_AT_ONCE // PANEL
    for first in range(0, num_panels, step):
        some = rows[first * PANEL : (first + step) * PANEL]
        blocks = layout.arrange(kind, some, team.library)
        panels[first : first + step] = blocks.flatten(1)
    return packed


def _rows_of_columns(n: int, num_panels: int, gated: bool) -> Tensor:
    """Return the row of the weight in each packed column; -1 = none."""
    columns = torch.arange(num_panels * PANEL)
    if not gated:
        return torch.where(columns < n, columns, -1)
    within = columns // (2 * LANES) * LANES + columns % LANES
    rows = within + columns // LANES % 2 * (n // 2)
    return torch.where(within < n // 2, rows, -1)


def take(values: Tensor, rows: Tensor, *, width: int, padding: int | float = 0) -> Tensor:
    """Return `rows` of values [n, w] as [C, width]; `padding` for row -1 and further columns."""
    taken = values.new_full((len(rows), width), padding)
    taken[:, : values.shape[1]] = values[rows.clamp_min(0)]
    taken[rows < 0] = padding
    return taken


def scale_blocks(scales: Tensor) -> Tensor:
    """Arrange numbers [C, blocks] as bytes [panels, blocks, bytes of 64 numbers]."""
    by_panel = scales.view(-1, PANEL, scales.shape[1]).transpose(1, 2).contiguous()
    return by_panel.view(torch.uint8)


def planes(codes: Tensor, group: int, widths: tuple[int, ...], library: Library) -> Tensor:
    """Arrange codes [C, k] as [panels, groups, bytes] in planes of some bits.

    The first width is that of the lowest bits, which come last. A word of a plane of b bits holds
    8 / b steps of k; the words of all planes that have the same steps follow each other.
    """
    steps = 8 // min(widths)
    units = codes.view(len(codes), -1, group // (4 * steps), steps, 4)
    words, shift = [], 0
    for bits in widths:
        digits = (units >> shift & (1 << bits) - 1).view(*units.shape[:3], -1, 8 // bits, 4)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
        words.append((digits << shifts).sum(4, dtype=torch.uint8))
        shift += bits
    return _words(torch.cat(words[::-1], dim=3).flatten(2, 3), library)


def _words(words: Tensor, library: Library) -> Tensor:
    """Arrange words [C, G, steps of k, 4] uint8 as [panels, G, bytes]."""
    _, groups, steps, _ = words.shape
    vectors = words.reshape(-1, PANEL // LANES, LANES, groups, steps, 4)
    if library.has_tiles():
        return vectors.permute(0, 3, 1, 4, 2, 5).flatten(2)
    return vectors.permute(0, 3, 4, 1, 2, 5).flatten(2)


def _of_integers(
    bits: int, group: int, block: int, number: torch.dtype, *, zeros: bool = False
) -> Layout:
    """Lay out integers.

    bits:    of a stored code: 4 or 8
    group:   inputs whose codes are adjacent
    block:   inputs that share a scale
    number:  type of the stored scales
    zeros:   whether blocks have zeros
    """
    middle = 8 if bits == 4 else 0  # the stored code that stands for 0 in symmetric weights

    def holds(kind: WeightKind) -> bool:
        if not isinstance(kind, IntWeight) or (kind.bits > 4) != (bits == 8):
            return False
        size, moved = group_size(kind), _moved_zeros(kind, middle)
        fit = (moved == moved.to(torch.int8)) if zeros else moved == middle
        return (
            (size == kind.shape[1] or (size > 0 and size % block == 0))
            and torch.equal(kind.scales.to(number).double(), kind.scales.double())
            and bool(fit.all())
        )

    def arrange(kind: WeightKind, rows: Tensor, library: Library) -> Tensor:
        assert isinstance(kind, IntWeight)
        blocks = kind.groups[::block]
        parts = [scale_blocks(take(kind.scales[:, blocks].to(number), rows, width=len(blocks)))]
        if zeros:
            moved = _moved_zeros(kind, middle).to(torch.int8)[:, blocks]
            parts.append(scale_blocks(take(moved, rows, width=len(blocks))))
        taken = take(kind.codes, rows, width=len(blocks) * block)
        codes = taken.view(torch.uint8) - _unsigned_middle(kind) + middle
        codes = codes & 15 if bits == 4 else codes if library.has_tiles() else codes ^ 128
        parts.append(planes(codes, group, (bits,), library).view(len(parts[0]), len(blocks), -1))
        return torch.cat(parts, dim=2)

    return Layout(holds, arrange)


def group_size(kind: IntWeight) -> int:
    """Return how many consecutive inputs share a scale; 0 if they are not in order."""
    size = int((kind.groups == kind.groups[0]).sum())
    expected = torch.arange(len(kind.groups)) // size
    return size if torch.equal(kind.groups, expected) else 0


def _unsigned_middle(kind: IntWeight) -> int:
    return 1 << (kind.bits - 1) if kind.codes.dtype == torch.uint8 else 0


def _moved_zeros(kind: IntWeight, middle: int) -> Tensor:
    """Return zeros [n, G] int32, moved as much as codes are."""
    zeros = torch.zeros(1, 1) if kind.zeros is None else kind.zeros
    return (zeros.int() - _unsigned_middle(kind) + middle).expand(kind.scales.shape)


def _of_blocks(type_name: str, *widths: int) -> Layout:
    """Lay out blocks of GGUF, the bits of a code in planes of these widths."""
    type = BLOCK_TYPES[type_name]

    def holds(kind: WeightKind) -> bool:
        return isinstance(kind, BlockWeight) and kind.type == type_name

    def arrange(kind: WeightKind, rows: Tensor, library: Library) -> Tensor:
        assert isinstance(kind, BlockWeight)
        blocks = take(kind.blocks, rows, width=kind.blocks.shape[1])
        parts = BlockWeight(blocks=blocks, type=type_name, size=(len(rows), kind.size[1])).split()
        is_signed = type.bits == 8 and library.has_tiles()
        codes = parts.codes ^ 128 if is_signed else parts.codes
        levels = [scale_blocks(level) for level in parts.levels]
        by_group = torch.cat((*levels, planes(codes, type.group, widths, library)), dim=2)
        by_block = [scale_blocks(number) for number in parts.numbers]
        return torch.cat((*by_block, by_group.view(*by_block[0].shape[:2], -1)), dim=2)

    return Layout(holds, arrange)


def _is_mxfp4(kind: WeightKind) -> bool:
    """Whether scales are of 32 inputs and powers of two, or have no effect."""
    if not isinstance(kind, Float4Weight) or len(kind.shape) != 2:
        return False
    scales, (n, k) = kind.whole_scales, kind.shape
    if k != 32 * scales.shape[1]:
        return False
    is_zero = scales == 0
    is_power = (torch.frexp(scales).mantissa == 0.5) & (scales >= 2.0**-125)
    codes = kind.values.view(n, -1, 16)[~is_zero & ~is_power]
    return not (codes & 0x77).any()


def _mxfp4_blocks(kind: WeightKind, rows: Tensor, library: Library) -> Tensor:
    assert isinstance(kind, Float4Weight)
    pairs = take(kind.values, rows, width=kind.values.shape[1])
    codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
    halves = take(kind.whole_scales, rows, width=kind.scales.shape[1]) / 2
    exponents = (halves.view(torch.int32) >> 23).to(torch.uint8)
    return torch.cat((scale_blocks(exponents), planes(codes, 32, (4,), library)), dim=2)


def _is_float8(kind: WeightKind) -> bool:
    if not isinstance(kind, Float8Weight) or kind.values.dtype != torch.float8_e4m3fn:
        return False
    _, wide = kind.block
    return len(kind.shape) == 2 and (wide >= kind.shape[1] or wide % FLOAT8_BLOCK == 0)


def _float8_panels(kind: WeightKind, rows: Tensor, library: Library) -> Tensor:
    assert isinstance(kind, Float8Weight)
    high, wide = kind.block
    k = kind.shape[1]
    codes = take(kind.values.view(torch.uint8), rows, width=library.padded_k(Format.F8, k))
    starts = torch.arange(0, k, FLOAT8_BLOCK)
    of_blocks = torch.where(rows < 0, -1, rows // high)
    scales = take(kind.scales, of_blocks, width=kind.scales.shape[1])[:, starts // wide].float()
    parts = []
    for at, start in enumerate(starts.tolist()):
        block = codes[:, start : start + FLOAT8_BLOCK]
        is_nan = ((block & 0x7F) == 0x7F).any(1)
        scale = torch.where(is_nan, torch.nan, scales[:, at])
        parts.append(scale.view(-1, PANEL).contiguous().view(torch.uint8))
        parts.append(_pairs(block.reshape(len(block), -1, 2), library))
    return torch.cat(parts, dim=1)


def _pairs(codes: Tensor, library: Library) -> Tensor:
    """Arrange codes of pairs of inputs [C, k / 2, bytes] in the order of tiles of bfloat16.

    Returns [panels, bytes].
    """
    _, steps, width = codes.shape
    if library.has_tiles():
        tiles = codes.reshape(-1, PANEL // LANES, LANES, steps // LANES, LANES, width)
        return tiles.permute(0, 3, 1, 4, 2, 5).flatten(1)
    return codes.reshape(-1, PANEL, steps, width).transpose(1, 2).flatten(1)


def _is_table(kind: WeightKind) -> bool:
    """Whether runs are parts of rows."""
    if not isinstance(kind, TableWeight):
        return False
    return kind.run % TABLE_BLOCK == 0 and kind.shape[1] % kind.run == 0


def _table_panels(kind: WeightKind, rows: Tensor, library: Library) -> Tensor:
    assert isinstance(kind, TableWeight)
    n, k = kind.shape
    pairs = take(kind.values.view(n, -1), rows, width=k // 2)
    of_runs = take(kind.scales.view(n, -1), rows, width=k // kind.run)
    scales = of_runs.repeat_interleave(kind.run // TABLE_BLOCK, 1)
    codes = _pairs((pairs >> 4 | pairs << 4)[..., None], library)
    num_panels, num_blocks = len(codes), scales.shape[1]
    table = kind.table.bfloat16().repeat(2).view(torch.uint8).expand(num_panels, -1)
    codes = codes.view(num_panels, num_blocks, -1)
    blocks = torch.cat((scale_blocks(scales), codes), dim=2)
    return torch.cat((table, blocks.flatten(1)), dim=1)


# The first that holds a weight is taken: the one of the fewest bytes.
_LAYOUTS = (
    (Format.Q8, _of_integers(8, 64, 64, torch.bfloat16)),
    (Format.I4_128, _of_integers(4, 64, 128, torch.float16)),
    (Format.I4Z_128, _of_integers(4, 64, 128, torch.float16, zeros=True)),
    (Format.I4Z_64, _of_integers(4, 64, 64, torch.float16, zeros=True)),
    (Format.Q4_0, _of_integers(4, 32, 32, torch.float16)),
    (Format.I4Z_32, _of_integers(4, 32, 32, torch.float16, zeros=True)),
    (Format.I8_128, _of_integers(8, 64, 128, torch.float32)),
    (Format.I8Z_64, _of_integers(8, 64, 64, torch.float16, zeros=True)),
    (Format.Q8_0, _of_integers(8, 32, 32, torch.float16)),
    (Format.I8Z_32, _of_integers(8, 32, 32, torch.float16, zeros=True)),
    (Format.Q4_0, _of_blocks("Q4_0", 4)),
    (Format.Q4_1, _of_blocks("Q4_1", 4)),
    (Format.Q5_0, _of_blocks("Q5_0", 4, 1)),
    (Format.Q5_1, _of_blocks("Q5_1", 4, 1)),
    (Format.Q8_0, _of_blocks("Q8_0", 8)),
    (Format.Q2_K, _of_blocks("Q2_K", 2)),
    (Format.Q3_K, _of_blocks("Q3_K", 4)),
    (Format.Q4_K, _of_blocks("Q4_K", 4)),
    (Format.Q5_K, _of_blocks("Q5_K", 4, 1)),
    (Format.Q6_K, _of_blocks("Q6_K", 4, 2)),
    (Format.IQ4_NL, _of_blocks("IQ4_NL", 4)),
    (Format.IQ4_XS, _of_blocks("IQ4_XS", 4)),
    (Format.MXFP4, Layout(_is_mxfp4, _mxfp4_blocks)),
    (Format.F8, Layout(_is_float8, _float8_panels)),
    (Format.T4, Layout(_is_table, _table_panels)),
)
