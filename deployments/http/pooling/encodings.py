"""How numbers are written: lists, base64 or raw bytes, in several number formats and byte orders.

Does not know models, bodies or routes.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remora.configs.errors import InvalidRequest
from remora.engine.types import FloatArray

MAX_DESCRIBED = 128  # arrays of an answer whose header describes each of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How an array is written.

    form:        float, base64, bytes or bytes_only
    dtype:       float32, float16, bfloat16, fp8_e4m3 or fp8_e5m2
    endianness:  native, big or little
    """

    form: str = "float"
    dtype: str = "float32"
    endianness: str = "native"

    @property
    def is_binary(self) -> bool:
        """Whether the whole answer is bytes instead of JSON."""
        return self.form in ("bytes", "bytes_only")

    def value(self, numbers: FloatArray) -> Any:
        """Return an array for JSON: nested lists, or its bytes in base64."""
        if self.form == "float":
            return numbers.tolist()
        return base64.b64encode(self.raw(numbers)).decode()

    def raw(self, numbers: FloatArray) -> bytes:
        """Return the bytes of an array, row by row."""
        is_big = self.endianness == "big" or (
            self.endianness == "native" and sys.byteorder == "big"
        )
        order = ">" if is_big else "<"
        if self.dtype == "bfloat16":
            return bytes(_bfloat16(numbers).astype(f"{order}u2").tobytes())
        if self.dtype.startswith("fp8"):
            return _float8(numbers, self.dtype)
        with np.errstate(over="ignore"):  # becomes infinite, as in torch
            kind = "f2" if self.dtype == "float16" else "f4"
            return bytes(np.ascontiguousarray(numbers, dtype=f"{order}{kind}").tobytes())


@dataclass(frozen=True, slots=True)
class BinaryAnswer:
    """An answer of bytes.

    metadata:  describes the parts, for a response header; None = no header
    """

    content: bytes
    metadata: str | None

    @property
    def headers(self) -> dict[str, str]:
        """The response headers."""
        return {} if self.metadata is None else {"metadata": self.metadata}


def binary_answer(
    arrays: Sequence[FloatArray], encoding: Encoding, about: dict[str, Any]
) -> BinaryAnswer:
    """Return arrays one after another, with the place and shape of each in the metadata.

    about:  id, created, model and usage
    """
    parts = [encoding.raw(array) for array in arrays]
    if encoding.form == "bytes_only":
        return BinaryAnswer(b"".join(parts), None)
    items, start = [], 0
    for index, (array, part) in enumerate(zip(arrays, parts, strict=True)):
        items.append(
            {
                "index": index,
                "embed_dtype": encoding.dtype,
                "endianness": encoding.endianness,
                "start": start,
                "end": start + len(part),
                "shape": list(array.shape),
            }
        )
        start += len(part)
    return BinaryAnswer(b"".join(parts), json.dumps({**about, "data": items}))


def check_described(num_arrays: int, encoding: Encoding, param: str) -> None:
    """Raise InvalidRequest for more arrays than a response header can describe."""
    if encoding.form == "bytes" and num_arrays > MAX_DESCRIBED:
        raise InvalidRequest(
            f"{param} has {num_arrays} entries; with encoding_format bytes, a response header "
            f"describes each of them, and {MAX_DESCRIBED} are allowed. Send fewer, or use "
            "bytes_only.",
            param,
        )


def _bfloat16(numbers: FloatArray) -> Any:
    """Round to the nearest bfloat16, ties to even; return the bit patterns."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _float8(numbers: FloatArray, dtype: str) -> bytes:
    import torch

    kind = torch.float8_e4m3fn if dtype == "fp8_e4m3" else torch.float8_e5m2
    values = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))
    raw: bytes = values.to(kind).view(torch.uint8).numpy().tobytes()
    return raw
