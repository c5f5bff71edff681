"""Weights in safetensors files: one, or several with an index. Memory-mapped, read file by file.

Pickle-based formats are refused: loading one runs whatever code its author put in.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from remora.configs.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
PICKLES = ("*.bin", "*.pt", "*.pth")


class SafetensorsWeights:
    """WeightSource over the safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.label = folder.name
        self._names: dict[Path, list[str]] = {}
        self._dtypes: Counter[str] = Counter()
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in find_files(folder):
            with _open(file) as opened:
                self._names[file] = list(opened.keys())
                for name in self._names[file]:
                    view = opened.get_slice(name)
                    self._shapes[name] = tuple(view.get_shape())
                    self._dtypes[view.get_dtype()] += 1

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, from the files' headers."""
        return self._shapes

    def dtype(self) -> str:
        """Return the dtype of most tensors. Raises ConfigError if we cannot compute in it."""
        most = self._dtypes.most_common(1)[0][0] if self._dtypes else "none"
        if most not in DTYPES:
            raise ConfigError(
                f"the weights in {self.label} are stored as {most}; "
                f"only {', '.join(DTYPES)} can be loaded."
            )
        return DTYPES[most]

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, mapped from its file."""
        for file, names in self._names.items():
            with _open(file) as opened:
                for name in names:
                    yield name, opened.get_tensor(name)


def find_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder. Raises ConfigError when there are none we read."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ConfigError(
            f"{folder} holds {pickles[0]}, a pickle: loading it would run code from the file. "
            "Only safetensors and GGUF are read; convert it with transformers' save_pretrained."
        )
    raise ConfigError(
        f"{folder} holds no weights: looked for {SINGLE} and {INDEX}. "
        "To run with random weights set load_format: dummy."
    )


def _indexed_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} cannot be read as an index of weights: {error}.") from error
    if any(Path(name).name != name for name in names):
        raise ConfigError(f"{index} names a file outside its folder.")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ConfigError(
            f"{len(absent)} of the {len(names)} weight files that {index} names are not there, "
            f"{absent[0]} first. Is the download complete?"
        )
    return [folder / name for name in names]


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file} cannot be read as safetensors: {error}. Is the download complete?"
        ) from error
