"""Reads safetensors files, one or several with an index, tensor by tensor.

A file's header is checked before a tensor is read: every tensor is inside the file, has the number
of bytes of its shape, and overlaps no other.
"""

from __future__ import annotations

import json
import math
import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.weights.files import find_files, weight_files
from remora.engine.weights.mmap import map_range, read_range

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Files may also hold tensors of other dtypes that the model does not use.
STORED = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
HEADER_START = 8  # bytes, after the length of the header
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


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

    mmap:  map tensors from their files; False = read them
    """

    def __init__(self, folder: Path, *, mmap: bool = True) -> None:
        self.label = folder.name
        self._part = map_range if mmap else read_range
        headers = {file: _read_header(file) for file in find_files(folder)}
        entries = [entry for header in headers.values() for entry in header]
        repeated = [name for name, n in Counter(entry.name for entry in entries).items() if n > 1]
        if repeated:
            raise ConfigError(f"{folder} holds {repeated[0]} in two of its weight files.")
        self._places = {
            entry.name: (file, place)
            for file, header in headers.items()
            for place, entry in enumerate(header)
        }
        self._headers = headers
        self._dtypes = Counter(entry.dtype for entry in entries)
        self._shapes = {entry.name: entry.shape for entry in entries}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, from the files' headers."""
        return self._shapes

    def dtype(self) -> str:
        """Return the most frequent dtype. Raises ConfigError if it is not supported."""
        most = self._dtypes.most_common(1)[0][0] if self._dtypes else "none"
        if most not in DTYPES:
            raise ConfigError(
                f"the weights in {self.label} are stored as {most}; "
                f"only {', '.join(DTYPES)} can be loaded."
            )
        return DTYPES[most]

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names, one at a time.

        With mmap only the pages that are accessed are read.
        """
        places = sorted(self._places[name] for name in set(names) & self._places.keys())
        for file, inside in groupby(places, key=operator.itemgetter(0)):
            with file.open("rb") as opened:
                for _, place in inside:
                    entry = self._headers[file][place]
                    memory = self._part(opened, entry.start, entry.end - entry.start)
                    yield entry.name, entry.view(memory)


MADE_UP = "bfloat16"  # dtype if there are no weight files


def stored_dtype(folder: Path) -> str:
    """Return the dtype of a folder's weights, from their headers.

    Pickles count as float32, because configs without a dtype are older than other dtypes. Missing
    weights are not an error here: loading reports them, or generates random ones.
    """
    files = weight_files(folder)
    if not files:
        return MADE_UP
    if all(file.suffix != ".safetensors" for file in files):
        return "float32"
    return SafetensorsWeights(folder).dtype()


def _read_header(file: Path) -> list[_Entry]:
    """Return the tensors of a file in file order, which is fastest to read."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(HEADER_START), "little")
        first = HEADER_START + length
        if first > size or length > MAX_HEADER_BYTES:
            raise _damaged(file, f"its header claims {length:,} bytes, and the file has {size:,}")
        try:
            header = json.loads(opened.read(length))
        except (ValueError, RecursionError) as error:
            raise _damaged(file, f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(file, f"its header is a {type(header).__name__}; expected an object")
    header.pop("__metadata__", None)
    entries = [_entry(file, name, said, first) for name, said in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    end = first
    for entry in entries:
        if entry.start != end:
            what = "a gap" if entry.start > end else "another tensor"
            raise _damaged(
                file, f"{entry.name} begins at byte {entry.start:,}, where {what} is ({end:,})"
            )
        end = entry.end
        if end > size:
            raise _damaged(file, f"{entry.name} ends at byte {end:,}, and the file has {size:,}")
    return entries


def _entry(file: Path, name: str, said: Any, first: int) -> _Entry:
    try:
        dtype, shape = str(said["dtype"]), tuple(map(operator.index, said["shape"]))
        start, end = map(operator.index, said["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(
            file, f"{name} has no dtype, shape and two data_offsets in the header"
        ) from error
    if dtype not in STORED:
        raise ConfigError(
            f"{file} holds {name} ({dtype}); only tensors of {', '.join(STORED)} can be read."
        )
    expected = math.prod(shape) * STORED[dtype].itemsize
    if min((start, *shape)) < 0 or end - start != expected:
        raise _damaged(
            file,
            f"{name}, {dtype} {list(shape)}, is said to lie in bytes {start:,} to {end:,}; "
            f"expected {expected:,} bytes",
        )
    return _Entry(name=name, dtype=dtype, shape=shape, start=first + start, end=first + end)


def _damaged(file: Path, what: str) -> ConfigError:
    return ConfigError(f"{file} cannot be read as safetensors: {what}. Is the download complete?")
