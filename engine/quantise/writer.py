"""Writes a quantised checkpoint in the `pack-quantized` format of compressed-tensors.

Tensors are written as they come, a file at a time, into a folder that gets its name when it is
complete. Knows nothing of how weights were rounded.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.models.checkpoint import QUANTIZATION
from remora.engine.quantise.search import Scheme
from remora.engine.weights.files import INDEX_ENDING, SAFETENSORS
from remora.engine.weights.formats.bits import pack_bits
from remora.engine.weights.formats.compressed_tensors import NAME, PACKED, SCALE, SHAPE, ZERO
from remora.kernels.quantised.weight_kinds import IntWeight

FILE_BYTES = 1 << 30
PICKLES = (".bin", ".pt", ".pth", ".gguf")
Json = dict[str, Any]


def packed_tensors(module: str, kind: IntWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Return the tensors of a module's weight, by name."""
    tensors = {
        module + PACKED: pack_bits(kind.codes, scheme.bits),
        module + SCALE: kind.scales,
        module + SHAPE: torch.tensor(kind.shape),
    }
    if not scheme.symmetric:
        assert kind.zeros is not None
        tensors[module + ZERO] = pack_bits(kind.zeros.T, scheme.bits).T
    return tensors


def quantization_settings(scheme: Scheme, ignore: list[str]) -> Json:
    """Return the `quantization_config` of a checkpoint.

    ignore:  the modules with weights that are not quantised
    """
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "group",
        "group_size": scheme.group_size,
        "dynamic": False,
        "observer": "minmax",
        "actorder": None,
        "block_structure": None,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": NAME,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


class CheckpointWriter:
    """Writes tensors to numbered files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._num_bytes = 0
        self.total_bytes = 0
        self._files: list[list[str]] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors, or keep them until there are enough for a file."""
        for name, tensor in tensors.items():
            self._waiting[name] = tensor.contiguous()
            self._num_bytes += tensor.nbytes
            if self._num_bytes >= FILE_BYTES:
                self._flush()

    def finish(self) -> None:
        """Write the last file, and the index if there are several."""
        if self._waiting:
            self._flush()
        total = len(self._files)
        places = {}
        for number, names in enumerate(self._files):
            file = _numbered(number + 1, total) if total > 1 else SAFETENSORS.single
            (self._folder / _part(number)).rename(self._folder / file)
            places.update(dict.fromkeys(names, file))
        if total > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": places}
            write_json(self._folder / f"{SAFETENSORS.single}{INDEX_ENDING}", index)

    def _flush(self) -> None:
        save_file(self._waiting, self._folder / _part(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._waiting))
        self.total_bytes += self._num_bytes
        self._waiting, self._num_bytes = {}, 0


def _part(number: int) -> str:
    return f"part-{number}"


def _numbered(number: int, total: int) -> str:
    return f"model-{number:05}-of-{total:05}.safetensors"


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write an object, indented."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_config(path: Path, folder: Path, settings: Json) -> None:
    """Write config.json of the checkpoint at `path` with these quantisation settings."""
    raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", {**raw, QUANTIZATION: settings})


def copy_other_files(path: Path, folder: Path) -> None:
    """Copy the tokenizer and all other files than weights and config.json."""
    for file in sorted(path.iterdir()):
        is_weights = ".safetensors" in file.name or file.suffix in PICKLES
        if file.is_file() and not is_weights and file.name != "config.json":
            shutil.copy(file, folder / file.name)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to `out` at the end, and deleted after an error.

    Raises ConfigError if `out` exists or cannot be written.
    """
    check_new(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}.") from error
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_new(out: Path) -> None:
    """Raise ConfigError if `out` exists."""
    if out.exists():
        raise ConfigError(f"{out} exists; give the name of a new folder.")
