"""Attention of a model of which some layers cache K and V in another format than the others.

Two backends with the same pages and tables, each with the K and V of its layers. Knows nothing of
how they attend, of formats, or of page ownership.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from remora.engine.attention.page_copies import copy_pages
from remora.engine.protocols import AttentionBackend
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope


class MixedAttention:
    """AttentionBackend over two backends.

    skipped:  [num_layers] which layers are in the second one
    make:     makes the backend of the layers that are skipped, or of the others
    """

    def __init__(self, skipped: Sequence[bool], make: Callable[[bool], AttentionBackend]) -> None:
        self.backends = backends = {kind: make(kind) for kind in (False, True)}
        self._places = [
            (backends[is_skipped], sum(other == is_skipped for other in skipped[:layer]))
            for layer, is_skipped in enumerate(skipped)
        ]

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Attend with the layer's backend; see `protocols.AttentionBackend`."""
        backend, place = self._places[layer]
        return backend.attend(place, heads, rope, batch, spec)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages in all layers."""
        for backend in self.backends.values():
            copy_pages(backend, sources, targets)
