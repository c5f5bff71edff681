"""Packing of weights into the layout of the native products."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from remora.kernels.cpu.library import LANES, PANEL, Format, Team
from remora.kernels.cpu.structs import WeightStruct, struct_of
from remora.kernels.memory import Arena

PACKED = (  # what `pack` converts to
    Format.F32,
    Format.BF16,
    Format.F16,
    Format.Q8,
    Format.Q4,
    Format.Q5_1,
    Format.Q8_0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [n, k] in the layout of src/linear.h.

    is_gated:  n / 2 gate rows and n / 2 up rows, packed alternately in blocks
    """

    format: Format
    n: int
    k: int
    is_gated: bool
    data: Tensor
    bias: Tensor | None

    @property
    def num_panels(self) -> int:
        """Panels of 64 output columns."""
        return -(-padded_n(self.n, self.is_gated) // PANEL)

    @property
    def out_columns(self) -> int:
        """Columns that a product writes, padding included."""
        return self.num_panels * PANEL // (2 if self.is_gated else 1)

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        return self.data.nbytes

    def struct(self) -> WeightStruct:
        """Return the library's view of it."""
        return struct_of(WeightStruct, self)


def allocate(
    team: Team,
    shape: tuple[int, int],
    bias: Tensor | None,
    format: Format,
    arena: Arena,
    *,
    gated: bool = False,
) -> PackedWeight:
    """Allocate a packed weight [n, k], whose bytes are zero.

    bias:   [n] or None
    arena:  allocator of the packed weight's memory
    gated:  the first n / 2 rows are gates, the others ups
    """
    n, k = shape
    if format not in PACKED:
        raise ValueError(f"weights are not rounded to {format.name}")
    if gated and n % 2:
        raise ValueError(f"the gated weight has {n} rows; the number must be even")
    return PackedWeight(
        format=format,
        n=n,
        k=k,
        is_gated=gated,
        data=arena.take(-(-padded_n(n, gated) // PANEL) * team.library.panel_bytes(format, k)),
        bias=None if bias is None else packed_bias(bias, gated),
    )


def pack_into(team: Team, packed: PackedWeight, weight: Tensor, *, spent: bool = False) -> None:
    """Pack a weight [n, k] of bfloat16, float16 or float32, quantising it for grouped formats.

    spent:  the weight's memory has no other reader: it is returned to the system while packing, so
            that two whole copies never exist, and its content is undefined afterwards
    """
    source = weight.contiguous()
    team.library.pack(
        team.pointer,
        byref(packed.struct()),
        source.data_ptr(),
        Format.of(source.dtype),
        packed.is_gated,
        spent,
    )


def pack(
    team: Team,
    weight: Tensor,
    bias: Tensor | None,
    format: Format,
    arena: Arena,
    *,
    gated: bool = False,
    spent: bool = False,
) -> PackedWeight:
    """Allocate and pack a weight [n, k]; see `allocate` and `pack_into`."""
    n, k = weight.shape
    packed = allocate(team, (n, k), bias, format, arena, gated=gated)
    pack_into(team, packed, weight, spent=spent)
    return packed


def padded_n(n: int, gated: bool) -> int:
    """Return the columns of a packed weight, without the rest of the last panel."""
    return 2 * (-(-(n // 2) // LANES) * LANES) if gated else n


def packed_bias(bias: Tensor, gated: bool) -> Tensor:
    """Reorder a bias like the packed columns, padded with zeros to whole panels."""
    padded = padded_n(len(bias), gated)
    values = bias.float()
    if gated:
        halves = torch.zeros(2, padded // 2)
        halves[:, : len(bias) // 2] = values.view(2, -1)
        values = halves.view(2, -1, LANES).transpose(0, 1).flatten()
    out = torch.zeros(-(-padded // PANEL) * PANEL)
    out[: len(values)] = values
    return out
