"""Weights in safetensors files: one, or several with an index. Read tensor by tensor.

Pickle-based formats are refused: loading one runs whatever code its author put in.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.weights.mapping import map_range, read_range

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
PICKLES = ("*.bin", "*.pt", "*.pth")
# Beside weights there may be tensors that the model has no use for.
STORED = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
HEADER_START = 8  # bytes, after the length of the header


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One tensor of a file; `start` and `end` are bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def view(self, memory: memoryview) -> Tensor:
        """Return the memory of [start, end) as the tensor."""
        if self.start == self.end:
            return torch.empty(self.shape, dtype=STORED[self.dtype])
        return torch.frombuffer(memory, dtype=STORED[self.dtype]).view(self.shape)


class SafetensorsWeights:
    """WeightSource over the safetensors files of a folder.

    mmap:  whether tensors are mapped from their files, or read whole
    """

    def __init__(self, folder: Path, *, mmap: bool = True) -> None:
        self.label = folder.name
        self._part = map_range if mmap else read_range
        self._files = {file: _read_header(file) for file in find_files(folder)}
        entries = [entry for header in self._files.values() for entry in header]
        self._dtypes = Counter(entry.dtype for entry in entries)
        self._shapes = {entry.name: entry.shape for entry in entries}

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

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names, one at a time.

        Of a file that is mapped only the pages that are looked at are read.
        """
        for file, entries in self._files.items():
            wanted = [entry for entry in entries if entry.name in names]
            with file.open("rb") as opened:
                for entry in wanted:
                    memory = self._part(opened, entry.start, entry.end - entry.start)
                    yield entry.name, entry.view(memory)


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


def _read_header(file: Path) -> list[_Entry]:
    """Return the tensors of a file in their order in it, which is the quickest to read."""
    try:
        with safe_open(str(file), framework="pt"):  # checks sizes and offsets
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(HEADER_START), "little")
            header = json.loads(opened.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read as safetensors: {error}. Is the download complete?"
        ) from error
    first = HEADER_START + length
    entries = [
        _Entry(
            name=name,
            dtype=said["dtype"],
            shape=tuple(said["shape"]),
            start=first + said["data_offsets"][0],
            end=first + said["data_offsets"][1],
        )
        for name, said in header.items()
        if name != "__metadata__"
    ]
    strange = [f"{entry.name} ({entry.dtype})" for entry in entries if entry.dtype not in STORED]
    if strange:
        raise ConfigError(
            f"{file} holds {strange[0]}; only tensors of {', '.join(STORED)} can be read."
        )
    return sorted(entries, key=lambda entry: entry.start)
