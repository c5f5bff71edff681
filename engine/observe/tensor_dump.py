"""Writes each layer's output to files: one safetensors file for each forward pass.

For comparisons with another implementation. Works with torch operations on a CPU; step programs and
graphs have no layers to observe.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

from safetensors.torch import save_file
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.models.decoder import Angles, DecoderBlock, DecoderModel
from remora.engine.runner.batch import ForwardBatch

logger = logging.getLogger(__name__)


class TensorDump:
    """Collects the layers' outputs of a pass, and writes them after the last layer.

    max_passes:  number of passes to write
    """

    def __init__(self, folder: Path, num_layers: int, *, max_passes: int) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"debug.tensor_dump_dir: {folder}: {error.strerror}") from None
        self._folder = folder
        self._num_layers = num_layers
        self._max_passes = max_passes
        self._num_passes = 0
        self._gathered: dict[str, Tensor] = {}

    def note(self, layer: int, batch: ForwardBatch, hidden: Tensor) -> None:
        """Add a layer's output [num_tokens, hidden_size]."""
        self._gathered[f"layer.{layer}"] = hidden
        if layer == self._num_layers - 1:
            self._write(batch)
            self._gathered = {}

    def _write(self, batch: ForwardBatch) -> None:
        if self._num_passes == self._max_passes:
            return
        self._num_passes += 1
        tensors = {"token_ids": batch.token_ids, "positions": batch.positions, **self._gathered}
        path = self._folder / f"pass-{self._num_passes:05d}.safetensors"
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        except OSError as error:
            logger.error("tensor dump: cannot write %s: %s", path, error)


class _Tapped:
    """A layer whose output is dumped."""

    def __init__(self, block: DecoderBlock, layer: int, dump: TensorDump) -> None:
        self._block, self._layer, self._dump = block, layer, dump

    def __call__(
        self, delta: Tensor | None, residual: Tensor, angles: Angles, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        """Run the layer."""
        batch: ForwardBatch = rest[0]
        added, stream = self._block(delta, residual, angles, *rest)
        self._dump.note(self._layer, batch, stream + added)
        return added, stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def dump_tensors(model: DecoderModel, folder: Path, *, max_passes: int) -> None:
    """Write the outputs of a model's layers from now on. Raises ConfigError."""
    dump = TensorDump(folder, len(model.blocks), max_passes=max_passes)
    tapped = [_Tapped(block, layer, dump) for layer, block in enumerate(model.blocks)]
    model.blocks = cast("list[DecoderBlock]", tapped)
