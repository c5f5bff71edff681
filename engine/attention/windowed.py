"""Attention of a model whose layers with a window have pages of their own.

Two backends, each over the KV of its layers; a layer goes to one of them with the tables of its
kind. Knows nothing of how they attend, nor of who owns which page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from remora.engine.protocols import AttentionBackend
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope


class WindowedAttention:
    """AttentionBackend out of two.

    windowed:  [num_layers] which layers have a window
    make:      makes a backend for so many layers, with a window or without
    """

    def __init__(
        self, windowed: Sequence[bool], make: Callable[[int, bool], AttentionBackend]
    ) -> None:
        num_windowed = sum(windowed)
        self.full = make(len(windowed) - num_windowed, False)
        self.windowed = make(num_windowed, True)
        self._places = [
            (is_windowed, sum(other == is_windowed for other in windowed[:layer]))
            for layer, is_windowed in enumerate(windowed)
        ]

    def attend(
        self,
        layer: int,
        heads: Tensor,
        turn: QKNormRope,
        batch: ForwardBatch,
        rule: AttentionSpec,
    ) -> Tensor:
        """Attend by the layer's backend; see `protocols.AttentionBackend`."""
        is_windowed, place = self._places[layer]
        if not is_windowed:
            return self.full.attend(place, heads, turn, batch, rule)
        assert batch.windowed is not None, "the tables of layers with a window are missing"
        return self.windowed.attend(place, heads, turn, batch.windowed, rule)
