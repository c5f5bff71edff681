"""Writes the weights that are served to a new checkpoint folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from remora.engine.protocols import WeightSource
from remora.engine.quantise.writer import CheckpointWriter, copy_other_files, new_folder

_CONFIG = "config.json"


def save_checkpoint(weights: WeightSource, model: Path, out: Path) -> int:
    """Write tensors in safetensors files, with the other files of the model; return their bytes.

    weights:  with the names of the checkpoint
    model:    folder of config.json and the tokenizer
    The folder appears under its name when it is complete. Raises ConfigError if `out` exists or
    cannot be written.
    """
    with new_folder(out) as folder:
        copy_other_files(model, folder)
        shutil.copy(model / _CONFIG, folder / _CONFIG)
        writer = CheckpointWriter(folder)
        for name, tensor in weights.read(weights.shapes().keys()):
            writer.add({name: tensor})
        writer.finish()
    return writer.total_bytes
