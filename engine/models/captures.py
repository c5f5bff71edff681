"""Keeps the inputs of some of a decoder's layers, which a draft head reads after the step.

The memory is fixed, so a captured graph writes to it, too. Knows no layers and no heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Captures:
    """The inputs of some layers, of the tokens of the latest step."""

    def __init__(
        self,
        layers: Sequence[int],
        *,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate; `layers` are counted in the whole model, and may repeat."""
        self._places = {layer: place for place, layer in enumerate(sorted({*layers}))}
        self._order = [self._places[layer] for layer in layers]
        shape = (len(self._places), max_tokens, hidden_size)
        self._states = torch.zeros(shape, dtype=dtype, device=device)

    def keep(self, layer: int, delta: Tensor | None, stream: Tensor) -> None:
        """Keep a layer's input, the stream [T, hidden_size] with what is still to be added."""
        place = self._places.get(layer)
        if place is None:
            return
        kept = self._states[place, : len(stream)]
        if delta is None:
            kept.copy_(stream)
        else:
            torch.add(stream, delta, out=kept)

    def states(self, tokens: Tensor) -> Tensor:
        """Return a copy of what was kept of tokens [N]: [N, layers * hidden_size], in order."""
        return torch.cat([self._states[place].index_select(0, tokens) for place in self._order], 1)
