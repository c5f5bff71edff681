"""An unquantised checkpoint, with its tensors by its own names and by the model's.

Fused tensors of a checkpoint are several of the model's; `assembled` makes them whole again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.models.architectures import parse_config
from remora.engine.models.checkpoint import QUANTIZATION, is_gguf, read_raw_config
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.load import filling
from remora.engine.parallel.shard import Shard
from remora.engine.weights.rename_tensors import RenamedWeights, RenamingRules
from remora.engine.weights.safetensors import SafetensorsWeights


class Checkpoint:
    """An unquantised checkpoint: its tensors by its own names and by the model's.

    dtype:  of its weights
    """

    def __init__(self, path: Path) -> None:
        """Read config and headers. Raises ConfigError if the checkpoint cannot be quantised."""
        if is_gguf(path):
            raise ConfigError(f"{path} is a GGUF file; give a folder with safetensors files.")
        raw = read_raw_config(path)
        if raw.get(QUANTIZATION):
            raise ConfigError(f"{path} is quantised already; give the original checkpoint.")
        self.path, self.label, self.config = path, path.name, parse_config(raw)
        if any(rule.is_transposed for rule in self.config.rules):
            raise ConfigError(
                f"{self.config.architecture} stores transposed weights, which are not quantised."
            )
        self.own = SafetensorsWeights(path)
        self.dtype: torch.dtype = getattr(torch, self.own.dtype())
        self.renamed = RenamedWeights(self.own, self.config.rules)
        self._renaming = RenamingRules(self.config.rules)
        self._theirs = {
            ours: theirs for theirs in self.own.shapes() for ours in self._renaming.names(theirs)
        }
        model = DecoderModel(self.config, dtype=self.dtype, device="meta")
        filling(model, self.renamed, show_progress=False, num_threads=1)  # compares names

    def fill(self, tensors: Mapping[str, Shard]) -> None:
        """Read tensors of the model."""
        for name, tensor in self.renamed.read(tensors.keys()):
            tensors[name].fill(tensor)

    def own_names(self, names: Collection[str]) -> set[str]:
        """Return the checkpoint's names of the model's tensors."""
        return {self._theirs[name] for name in names}

    def names_in(self, theirs: str) -> tuple[str, ...]:
        """Return the model's tensors that are in a tensor of the checkpoint."""
        return self._renaming.names(theirs)

    def is_matrix(self, name: str) -> bool:
        """Return whether one of the model's tensors is in a tensor of two dimensions."""
        return len(self.own.shapes()[self._theirs[name]]) == 2

    def assembled(self, theirs: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Return rows [outputs, ...] of a checkpoint's tensor from those of the model's in it."""
        names = self.names_in(theirs)
        places = self._renaming.rows(theirs, torch.arange(self.own.shapes()[theirs][0]))
        first = parts[names[0]]
        whole = first.new_empty(self.own.shapes()[theirs][:1] + first.shape[1:])
        for name, place in zip(names, places, strict=True):
            whole[place] = parts[name]
        return whole
