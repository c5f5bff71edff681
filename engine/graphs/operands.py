"""Buffers that the operations of a step program pass to each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from remora.kernels.cpu.buffers import Rows
from remora.kernels.cpu.library import PANEL, Format, Team
from remora.kernels.memory import buffer


class RowBuffers:
    """Memory for rows that one operation writes and products read, in each format of use.

    on_logits:  rows of logits, not of tokens
    """

    def __init__(self, team: Team, num_rows: int, size: int, *, on_logits: bool = False) -> None:
        """Allocate nothing yet; `size` values per row."""
        self.on_logits = on_logits
        self._team, self._num_rows, self._size = team, num_rows, size
        self._rows: dict[Format, Rows] = {}

    def rows(self, format: Format) -> Rows:
        """Return the rows that weights of a format are multiplied with."""
        if format.of_rows not in self._rows:
            self._rows[format.of_rows] = Rows.allocate(
                self._team, format, self._num_rows, whole_panels(self._size)
            )
        return self._rows[format.of_rows]

    def operand(
        self, formats: Iterable[Format], *, in_floats: bool = True, size: int | None = None
    ) -> Operand:
        """Return rows to be written anew; the operand before is no longer valid.

        formats:    of the weights that they are multiplied with
        in_floats:  written as float32 if they are read in groups; otherwise so only for products of
                    several formats
        size:       values per row; None = as many as there is room for
        """
        rows = {format.of_rows for format in formats}
        written = rows.pop() if len(rows) == 1 else Format.F32
        if written.is_grouped and in_floats:
            written = Format.F32
        return Operand(
            written=self.rows(written), size=self._size if size is None else size, buffers=self
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operand:
    """Rows that one operation writes and products read.

    written:  at least `size` values per row
    buffers:  of the rows in other formats
    rounded:  formats to which the rows have been rounded
    """

    written: Rows
    size: int
    buffers: RowBuffers
    rounded: set[Format] = field(default_factory=set)

    def rows(self, format: Format) -> Rows:
        """Return the rows as a product with a weight of this format reads them."""
        is_written = self.written.format is format.of_rows
        return self.written if is_written else self.buffers.rows(format)


def allocate_floats(num_rows: int, size: int) -> Tensor:
    """Allocate float32 [num_rows, size] with room for the panels that products write."""
    return buffer((num_rows, whole_panels(size)), torch.float32)


def whole_panels(size: int) -> int:
    """Round a number of columns up to whole panels."""
    return -(-size // PANEL) * PANEL
