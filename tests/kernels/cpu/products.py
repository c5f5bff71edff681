"""Products through the native library, and what a packed weight means, read back in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from remora.kernels.cpu.buffers import Batch, Rows, Updates
from remora.kernels.cpu.library import PANEL, Activation, Epilogue, Format, Team
from remora.kernels.cpu.packing import PackedWeight, pack
from remora.kernels.cpu.program import Program
from remora.kernels.memory import Arena

EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # unit roundoff of outputs
GUARD = -123.0
GUARD_COLUMNS = 16


def make_batch(max_tokens: int, max_rows: int = 1, tables: Tensor | None = None) -> Batch:
    return Batch(
        max_tokens=max_tokens,
        max_rows=max_rows,
        max_logits=max_tokens,
        tables=torch.zeros(1, 1, dtype=torch.int32) if tables is None else tables,
    )


@contextmanager
def one_step(team: Team, num_tokens: int) -> Iterator[Program]:
    """Yield a program to add operations to, and run it once."""
    program = Program(team, make_batch(num_tokens))
    yield program
    program.run(num_tokens, 0, 0)


def activation_of(epilogue: Epilogue) -> Activation:
    """Return what a gated product is tried with; others have none."""
    return Activation.SILU if epilogue is Epilogue.GATED else Activation.LINEAR


def pack_alone(
    team: Team, weight: Tensor, bias: Tensor | None, format: Format, *, gated: bool = False
) -> PackedWeight:
    """Pack a weight into memory of its own."""
    return pack(team, weight, bias, format, Arena(segment_bytes=0), gated=gated)


def make_rows(team: Team, format: Format, x: Tensor, size: int | None = None) -> Rows:
    """Put x [rows, k] into rows for at least `size` values, by the library where it quantises."""
    k = x.shape[1]
    rows = Rows.allocate(team, format, len(x), max(k, size or 0))
    if not format.is_grouped:
        rows.values[:, :k] = x
        return rows
    with one_step(team, len(x)) as program:
        program.round(x.contiguous(), k, rows)
    return rows


def has_tiles(team: Team) -> bool:
    """Return whether a team multiplies by tile registers."""
    return bool(team.library.padded_k(Format.BF16, 1) > 2)


def multiply(
    team: Team,
    rows: Rows,
    weight: PackedWeight,
    *,
    count: int | None = None,
    epilogue: Epilogue = Epilogue.STORE,
    activation: Activation | None = None,
    limit: float = 0.0,
    start: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    updates: tuple[Updates, Tensor, Sequence[int]] | None = None,
) -> Tensor:
    """Return the product of the first `count` rows, padding columns included.

    activation:  None = that of the epilogue
    start:       initial output, for ADD
    updates:     low-rank updates, the rows before they are rounded, and each row's slot
    Fails if anything beyond the output is written to.
    """
    count = len(rows.values) if count is None else count
    columns = weight.out_columns
    out = torch.full((count + 1, columns + GUARD_COLUMNS), GUARD, dtype=dtype)
    if start is not None:
        out[:count, :columns] = 0
        out[:count, : start.shape[1]] = start
    batch = make_batch(max(count, 1))
    program = Program(team, batch)
    if updates is not None:
        batch.adapters[:] = updates[2]
        program.shrink(updates[1], updates[0])
    program.multiply(
        rows,
        weight,
        out,
        epilogue,
        activation=activation_of(epilogue) if activation is None else activation,
        limit=limit,
        updates=updates[0] if updates else None,
    )
    program.run(count, 0, 0)
    assert (out[count] == GUARD).all(), "the row after the last was written to"
    assert (out[:, columns:] == GUARD).all(), "columns after the last were written to"
    return out[:count, :columns]


def check_product(
    out: Tensor, product: Tensor, bound: Tensor, epilogue: Epilogue, start: Tensor | None = None
) -> None:
    """Check a product after its epilogue.

    product, bound:  the exact product before the epilogue, and its largest error in float32
    start:           output before, for ADD
    """
    exact, rounding = product, EPS[torch.float32]
    if epilogue is Epilogue.GATED:
        # The slope of silu is at most 1.1.
        (gates, ups), (gate_bound, up_bound) = product.chunk(2, -1), bound.chunk(2, -1)
        opened = torch.nn.functional.silu(gates)
        exact = opened * ups
        bound = 1.1 * gate_bound * (ups.abs() + up_bound) + opened.abs() * up_bound
        bound += ((8 + 2 * gates.abs()) * rounding + EPS[out.dtype]) * exact.abs() + 1e-30
    elif start is not None:
        exact = product + start
        bound = bound + rounding * exact.abs()
    real, padding = out[:, : exact.shape[1]], out[:, exact.shape[1] :]
    assert ((real.double() - exact).abs() <= bound).all()
    assert not padding.any()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """What a packed weight says, in the order of its rows, padding cut off after a look at it.

    values:  [n, k] float64, dequantised exactly
    size:    [n, k] float64, at least |values|: the sum of the parts that make them up
    scale:   [n, k] float64, a step of the quantisation; 0 where there is none
    """

    values: Tensor
    size: Tensor
    scale: Tensor


def unpack(team: Team, weight: PackedWeight) -> Unpacked:
    """Read a packed weight back as src/linear.h describes it."""
    unpacks = _UNPACK_TILES if has_tiles(team) else _UNPACK
    columns, size, scale = unpacks[weight.format](weight.data, weight.num_panels)
    return Unpacked(
        values=_in_rows(columns, weight, check=True),
        size=_in_rows(size, weight),
        scale=_in_rows(scale, weight),
    )


def _in_rows(columns: Tensor, weight: PackedWeight, *, check: bool = False) -> Tensor:
    """Undo the order of gated columns; what pads the weight must be zero."""
    n = weight.n
    if not weight.is_gated:
        rows, rest = columns[:n], columns[n:]
    else:
        gate, up = columns.view(-1, 2, 16, columns.shape[1]).transpose(0, 1).flatten(1, 2)
        rows = torch.cat((gate[: n // 2], up[: n // 2]))
        rest = torch.cat((gate[n // 2 :], up[n // 2 :]))
    if check:
        assert not rest.any()
        # 0 need not be a level of int4 or int5; what pads x is 0 as well.
        assert weight.format in (Format.Q4, Format.Q5_1) or not rows[:, weight.k :].any()
    return rows[:, : weight.k]


def _unpack_plain(
    data: Tensor, panels: int, dtype: torch.dtype, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack elements of which `width` of a column are neighbours."""
    columns = data.view(dtype).view(panels, -1, PANEL, width).transpose(1, 2)
    values = columns.reshape(panels * PANEL, -1).double()
    return values, values.abs(), torch.zeros_like(values)


def _unpack_bf16_tiles(data: Tensor, panels: int) -> tuple[Tensor, Tensor, Tensor]:
    tiles = data.view(torch.bfloat16).view(panels, 2, -1, 2, 16, 16, 2)
    values = tiles.permute(0, 1, 3, 5, 2, 4, 6).reshape(panels * PANEL, -1).double()
    return values, values.abs(), torch.zeros_like(values)


def _unpack_bytes(
    data: Tensor, panels: int, size: int, number: torch.dtype, *, has_tiles: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack groups of `size` bytes with a scale of a dtype."""
    groups = data.view(panels, -1, 2 * PANEL + size * PANEL)
    scale = _per_column(groups[..., : 2 * PANEL], number)
    steps = _steps(groups[..., 2 * PANEL :], size // 4, has_tiles=has_tiles)
    levels = steps.view(torch.int8).double() if has_tiles else steps.double() - 128
    values = (levels.flatten(2) * scale).flatten(1)
    return values, values.abs(), scale.expand(-1, -1, size).flatten(1)


def _steps(groups: Tensor, count: int, *, has_tiles: bool) -> Tensor:
    """[panels, groups, bytes] -> [columns, groups, steps of k, 4]."""
    if has_tiles:
        tiles = groups.reshape(*groups.shape[:2], PANEL // 16, count, 16, 4)
        return tiles.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
    steps = groups.reshape(*groups.shape[:2], count, PANEL, 4)
    return steps.permute(0, 3, 1, 2, 4).flatten(0, 1)


def _unpack_q4(
    data: Tensor, panels: int, *, has_tiles: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    groups = data.view(panels, -1, 4 * PANEL + 16 * PANEL)
    scale = _per_column(groups[..., : 2 * PANEL])
    least = _per_column(groups[..., 2 * PANEL : 4 * PANEL])
    both = _steps(groups[..., 4 * PANEL :], 4, has_tiles=has_tiles)
    levels = torch.stack((both & 15, both >> 4), dim=3).flatten(2).double()
    values, size = levels * scale + least, (levels * scale).abs() + least.abs()
    return values.flatten(1), size.flatten(1), scale.expand(-1, -1, 32).flatten(1)


def _unpack_q5_1(
    data: Tensor, panels: int, *, has_tiles: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    groups = data.view(panels, -1, 4 * PANEL + 20 * PANEL)
    scale = _per_column(groups[..., : 2 * PANEL], torch.float16)
    least = -_per_column(groups[..., 2 * PANEL : 4 * PANEL], torch.float16)
    words = _steps(groups[..., 4 * PANEL :], 5, has_tiles=has_tiles)
    nibbles = torch.stack((words[:, :, 1:] & 15, words[:, :, 1:] >> 4), dim=3).flatten(2)
    fifth = torch.stack([words[:, :, 0] >> bit & 1 for bit in range(8)], dim=2).flatten(2)
    levels = (nibbles + 16 * fifth).double()
    values, size = levels * scale + least, (levels * scale).abs() + least.abs()
    return values.flatten(1), size.flatten(1), scale.expand(-1, -1, 32).flatten(1)


def _per_column(stored: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[panels, groups, bytes] -> [columns, groups, 1]."""
    numbers = stored.contiguous().view(dtype)
    return numbers.transpose(1, 2).flatten(0, 1).unsqueeze(-1).double()


_unpack_q8 = partial(_unpack_bytes, size=64, number=torch.bfloat16)
_unpack_q8_0 = partial(_unpack_bytes, size=32, number=torch.float16)
_UNPACK: dict[Format, Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]] = {
    Format.F32: partial(_unpack_plain, dtype=torch.float32, width=1),
    Format.BF16: partial(_unpack_plain, dtype=torch.bfloat16, width=2),
    Format.F16: partial(_unpack_plain, dtype=torch.float16, width=1),
    Format.Q8: _unpack_q8,
    Format.Q4: _unpack_q4,
    Format.Q5_1: _unpack_q5_1,
    Format.Q8_0: _unpack_q8_0,
}
_UNPACK_TILES = _UNPACK | {
    Format.BF16: _unpack_bf16_tiles,
    Format.Q8: partial(_unpack_q8, has_tiles=True),
    Format.Q4: partial(_unpack_q4, has_tiles=True),
    Format.Q5_1: partial(_unpack_q5_1, has_tiles=True),
    Format.Q8_0: partial(_unpack_q8_0, has_tiles=True),
}


def read_rows(rows: Rows, size: int) -> Tensor:
    """Return [rows, size] float64: exactly what a product reads."""
    if rows.scales is None:
        return rows.values[:, :size].double()
    assert not rows.values[:, size:].any()
    groups = rows.values.view(*rows.scales.shape, -1).double()
    return (groups * rows.scales.unsqueeze(-1).double()).flatten(1)[:, :size]
