"""Reads the one tensor of a safetensors file that a client has sent. Runs nothing of it.

Pickles, such as what `torch.save` writes, are not read: they are programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

_LENGTH_BYTES = 8
_PICKLES = (b"\x80", b"PK\x03\x04")
_METADATA = "__metadata__"


def _widened(codes: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return bfloat16 codes as float32."""
    return (codes.astype("<u4") << 16).view("<f4")


def _as_float32(numbers: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32)


_Read = Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]
_FORMATS: dict[str, tuple[str, _Read]] = {
    "BF16": ("<u2", _widened),
    "F16": ("<f2", _as_float32),
    "F32": ("<f4", _as_float32),
    "F64": ("<f8", _as_float32),
}


class NotOneTensor(ValueError):
    """The bytes are no safetensors file with one tensor of numbers. The text says what they are."""


def read_tensor(data: bytes) -> npt.NDArray[np.float32]:
    """Return the tensor of a file, in its shape. Raises NotOneTensor."""
    try:
        return _read(data)
    except NotOneTensor:
        if data.startswith(_PICKLES):
            raise NotOneTensor("looks like a pickle, as torch.save writes it") from None
        raise


def _read(data: bytes) -> npt.NDArray[np.float32]:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if len(data) < start:
        raise NotOneTensor("is no safetensors file")
    try:
        header = orjson.loads(data[_LENGTH_BYTES:start])
    except orjson.JSONDecodeError:
        raise NotOneTensor("is no safetensors file") from None
    entries = header if isinstance(header, dict) else {}
    tensors = [entry for name, entry in entries.items() if name != _METADATA]
    if len(tensors) != 1:
        raise NotOneTensor(f"has {len(tensors)} tensors")
    return _tensor(tensors[0], memoryview(data)[start:])


def _tensor(entry: Any, numbers: memoryview) -> npt.NDArray[np.float32]:
    found = entry if isinstance(entry, dict) else {}
    dtype, shape = found.get("dtype"), found.get("shape")
    if not isinstance(dtype, str) or dtype not in _FORMATS:
        raise NotOneTensor(f"has numbers of the format {str(dtype)[:20]}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise NotOneTensor("has a tensor without a shape")
    stored, read = _FORMATS[dtype]
    num_bytes = math.prod(shape) * np.dtype(stored).itemsize
    if found.get("data_offsets") != [0, num_bytes] or len(numbers) != num_bytes:
        raise NotOneTensor("is damaged: its tensor has another number of bytes than its shape says")
    return read(np.frombuffer(numbers, stored)).reshape(shape)
