"""Attention of a model whose window layers have a page pool of their own.

Two backends, one for window layers and one for the others, each with its own tables. Knows nothing
of how they attend or of page ownership.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from remora.engine.attention.page_copies import copy_pages
from remora.engine.protocols import AttentionBackend, HostPlanned
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope
from remora.engine.runner.inputs import StepInputs


class WindowedAttention:
    """AttentionBackend over two backends.

    windowed:  [num_layers] which layers have a window
    make:      makes the backend of the layers with a window, or of those without
    """

    def __init__(self, windowed: Sequence[bool], make: Callable[[bool], AttentionBackend]) -> None:
        self.full = make(False)
        self.windowed = make(True)
        self._places = [
            (is_windowed, sum(other == is_windowed for other in windowed[:layer]))
            for layer, is_windowed in enumerate(windowed)
        ]

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Attend with the layer's backend; see `protocols.AttentionBackend`."""
        is_windowed, place = self._places[layer]
        if not is_windowed:
            return self.full.attend(place, heads, rope, batch, spec)
        assert batch.windowed is not None, "tables of window layers are missing"
        return self.windowed.attend(place, heads, rope, batch.windowed, spec)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages in the layers without a window."""
        copy_pages(self.full, sources, targets)

    def plan_step(self, inputs: StepInputs, size: int | None) -> None:
        """Plan a step for each backend that plans; see `protocols.HostPlanned`."""
        windows = inputs.windows
        assert windows is not None, "tables of window layers are missing"
        if isinstance(self.full, HostPlanned):
            self.full.plan_step(inputs, size)
        if isinstance(self.windowed, HostPlanned):
            own = replace(inputs, slots=windows.slots, tables=windows.tables)
            self.windowed.plan_step(own, size)
