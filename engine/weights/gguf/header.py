"""Parses the header of a GGUF file: metadata and the description of tensors.

Everything is little-endian. Text and lists begin with their length in 8 bytes; every length is
compared with the rest of the file before anything is allocated, so a damaged one costs nothing.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from remora.configs.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensors, where metadata does not say
MAX_DIMENSIONS = 4
TEXT, LIST = 8, 9
SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """The header's entry for a tensor.

    sizes:   of its axes, the contiguous one first
    kind:    the number of its type
    offset:  bytes from the first tensor's start
    """

    name: str
    sizes: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a file.

    data_start:  bytes before the first tensor
    """

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    data_start: int
    file_size: int


def read_header(file: Path) -> Header:
    """Parse a file's header. Raises ConfigError if it is damaged or unsupported."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        return _Reader(file, whole).header()


class _Reader:
    """Reads one value after the other from the start of a file."""

    def __init__(self, file: Path, memory: mmap.mmap) -> None:
        self._file, self._memory, self._at = file, memory, 0

    def header(self) -> Header:
        magic = self._bytes(len(MAGIC))
        if magic != MAGIC:
            raise self._damaged(f"it begins with {magic!r}; expected {MAGIC!r}")
        version = self._number("<I")
        if version not in VERSIONS:
            raise self._damaged(f"its version is {version}; known are {VERSIONS}")
        num_tensors, num_entries = self._number("<Q"), self._number("<Q")
        self._check_count(num_tensors, 24, "tensors")
        self._check_count(num_entries, 13, "entries of metadata")
        metadata = {}
        for _ in range(num_entries):
            key = self._text()
            metadata[key] = self._value(self._number("<I"))
        tensors = tuple(self._tensor() for _ in range(num_tensors))
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment is {alignment!r}; expected a number above 0")
        return Header(
            metadata=metadata,
            tensors=tensors,
            data_start=-(-self._at // alignment) * alignment,
            file_size=len(self._memory),
        )

    def _tensor(self) -> TensorInfo:
        name = self._text()
        num_sizes = self._number("<I")
        if num_sizes > MAX_DIMENSIONS:
            raise self._damaged(f"{name} has {num_sizes} dimensions; at most {MAX_DIMENSIONS}")
        sizes = tuple(self._number("<Q") for _ in range(num_sizes))
        if math.prod(sizes) > 2**48:
            raise self._damaged(f"{name} has the shape {list(reversed(sizes))}")
        return TensorInfo(
            name=name, sizes=sizes, kind=self._number("<I"), offset=self._number("<Q")
        )

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind != LIST:
            return self._scalars(kind, 1)[0]
        inner, length = self._number("<I"), self._number("<Q")
        if inner not in (TEXT, LIST):
            return self._scalars(inner, length)
        self._check_count(length, 8, "entries of a list")
        return [self._value(inner) for _ in range(length)]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise self._damaged(f"a value has the type {kind} at byte {self._at:,}")
        self._check_count(count, SCALARS[kind].itemsize, "numbers")
        values: list[Any] = np.frombuffer(
            self._bytes(count * SCALARS[kind].itemsize), SCALARS[kind]
        ).tolist()
        return values

    def _text(self) -> str:
        content = self._bytes(self._number("<Q"))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"a text before byte {self._at:,} is no UTF-8") from error

    def _number(self, layout: str) -> int:
        return int(struct.unpack(layout, self._bytes(struct.calcsize(layout)))[0])

    def _bytes(self, count: int) -> bytes:
        self._check_count(count, 1, "bytes")
        start, self._at = self._at, self._at + count
        return self._memory[start : self._at]

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        left = len(self._memory) - self._at
        if count * least_bytes > left:
            raise self._damaged(
                f"at byte {self._at:,} {count:,} {what} are to follow, and {left:,} bytes do"
            )

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self._file} cannot be read as GGUF: {what}. Is the download complete?"
        )
