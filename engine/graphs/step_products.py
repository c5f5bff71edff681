"""Products with linear layers in step programs. Parts in several formats are several products."""

from __future__ import annotations

import torch
from torch import Tensor

from remora.engine.graphs.operands import Operand
from remora.engine.graphs.step_weights import Weights
from remora.engine.layers.linear import Linear
from remora.kernels.cpu.buffers import Rows, Updates
from remora.kernels.cpu.library import Activation, Epilogue, Format
from remora.kernels.cpu.program import Program
from remora.kernels.lora import LowRankSlots
from remora.kernels.memory import buffer


class Products:
    """Adds products with linear layers."""

    def __init__(self, program: Program, weights: Weights, max_rows: int) -> None:
        """See `add`.

        max_rows:  of an operand
        """
        self._program, self._weights, self._max_rows = program, weights, max_rows
        self._shrunk: dict[int, Tensor] = {}

    def formats(self, *linears: Linear) -> frozenset[Format]:
        """Return the formats of the layers' weights, which are packed unless they are."""
        return self._weights.formats(*linears)

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
        for piece in self._weights.pack(linear):
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
