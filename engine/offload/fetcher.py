"""The order in which weights of offloaded layers are copied to buffers and used.

Offloaded layers are numbered in the order of the forward pass, and layer n has buffer n modulo
their number. A copy begins when the steps' work so far no longer needs its buffer, as many layers
ahead as there are buffers, and a layer waits for its copy. Each pass starts with copies of the
first layers and leaves none behind, so a captured graph of a pass is complete by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remora.engine.offload.streams import CopyStreams


class LayerFetcher:
    """Copies each layer to its buffer ahead of its use.

    buffers:  memory on the device, [bytes of the largest of its layers] uint8 each
    """

    def __init__(
        self, layers: Sequence[Sequence[Tensor]], num_ahead: int, streams: CopyStreams
    ) -> None:
        """Allocate the buffers.

        layers:     host memory of each, uint8
        num_ahead:  copies begin this many layers ahead; 0 = when a layer is reached
        """
        self._layers, self._num_ahead, self._streams = layers, num_ahead, streams
        self._sizes = [sum(map(len, layer)) for layer in layers]
        number = max(1, num_ahead)
        self.buffers = [
            torch.empty(max(self._sizes[first::number]), dtype=torch.uint8, device=streams.device)
            for first in range(min(number, len(layers)))
        ]
        self._unused = [streams.event() for _ in self.buffers]
        self._copied = [streams.event() for _ in self.buffers]

    def buffer(self, layer: int) -> Tensor:
        """Return the buffer of a layer."""
        return self.buffers[layer % len(self.buffers)]

    def begin(self) -> None:
        """Start the copies of the first layers; call it when a pass begins."""
        for layer in range(min(self._num_ahead, len(self._layers))):
            self._copy(layer)

    def acquire(self, layer: int) -> None:
        """Let the work that is launched from now on wait for the weights of a layer."""
        if self._num_ahead == 0:
            self._copy(layer)
        self._streams.wait(self._copied[layer % len(self.buffers)])

    def release(self, layer: int) -> None:
        """Start the copy of the next layer of the same buffer, after the work launched so far."""
        following = layer + self._num_ahead
        if self._num_ahead and following < len(self._layers):
            self._copy(following)

    def _copy(self, layer: int) -> None:
        place = layer % len(self.buffers)
        unused, copied = self._unused[place], self._copied[place]
        self._streams.record(unused)
        target = self.buffers[place][: self._sizes[layer]]
        self._streams.copy(target, self._layers[layer], after=unused, done=copied)
