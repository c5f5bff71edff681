"""Buffers that the operations of a step program pass to each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remora.kernels.cpu.buffers import Rows
from remora.kernels.cpu.library import PANEL, Format, Team
from remora.kernels.memory import buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Rows that one operation writes and a product reads.

    written:    at least `size` values per row
    rows:       as read: the same rows, or quantised ones
    on_logits:  rows of logits, not of tokens
    """

    written: Rows
    rows: Rows
    size: int
    on_logits: bool = False

    @staticmethod
    def allocate(
        team: Team,
        format: Format,
        num_rows: int,
        size: int,
        *,
        in_floats: bool = True,
        on_logits: bool = False,
    ) -> Operand:
        """Allocate rows.

        format:     of the weight that they are multiplied with
        in_floats:  written as float32, even if read in groups
        """

        def rows(format: Format) -> Rows:
            return Rows.allocate(team, format, num_rows, whole_panels(size))

        read = rows(format)
        written = rows(Format.F32) if format.is_grouped and in_floats else read
        return Operand(written=written, rows=read, size=size, on_logits=on_logits)


def allocate_floats(num_rows: int, size: int) -> Tensor:
    """Allocate float32 [num_rows, size] with room for the panels that products write."""
    return buffer((num_rows, whole_panels(size)), torch.float32)


def whole_panels(size: int) -> int:
    """Round a number of columns up to whole panels."""
    return -(-size // PANEL) * PANEL
