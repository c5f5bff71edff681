"""Dequantises GGUF's blocks, for every type that files use.

Plain floats are taken as stored. Blocks of codes are converted a few rows at a time to the wanted
dtype, so that a large matrix never exists in float32 as a whole. The gguf library converts most
types; the missing ones are here.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Blocks = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]

PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Few enough to fit the cache, and for the allocator to reuse the library's temporaries: four times
# as many allocate from the system for each piece and take two to three times as long.
VALUES_AT_ONCE = 2**16


def _q8_k(blocks: Blocks) -> Values:
    """A float32 scale, 256 bytes, and 16 sums that only products need."""
    scales = blocks[:, :4].view(np.float32)
    return scales * blocks[:, 4:260].view(np.int8)


def _q1_0(blocks: Blocks) -> Values:
    """A float16 scale and 128 signs, the lowest bit of a byte first."""
    scales = blocks[:, :2].view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return np.where(bits == 1, scales, -scales)


OWN: dict[str, Callable[[Blocks], Values]] = {"Q8_K": _q8_k, "Q1_0": _q1_0}


def is_readable(kind: Any) -> bool:
    """Return whether tensors of a gguf.GGMLQuantizationType can be read."""
    from gguf.quants import _type_traits

    return kind.name in PLAIN or kind.name in OWN or kind in _type_traits


def dequantise(
    memory: memoryview,
    kind: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    num_threads: int = 1,
) -> Tensor:
    """Return the tensor [shape] of these bytes.

    kind:   a gguf.GGMLQuantizationType; plain floats keep their dtype instead of `dtype`
    """
    if kind.name in PLAIN:
        return torch.frombuffer(memory, dtype=PLAIN[kind.name]).view(shape)
    from gguf import GGML_QUANT_SIZES

    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(memory, np.uint8).reshape(-1, block_bytes)
    out = torch.empty(len(blocks) * block_values, dtype=dtype)
    at_once = max(1, VALUES_AT_ONCE // block_values)

    @torch.inference_mode()  # threads of the pool are in no mode, and `out` may be of this one
    def convert(first: int) -> None:
        values = _values(blocks[first : first + at_once], kind)
        start = first * block_values
        out[start : start + values.size].copy_(torch.from_numpy(values.reshape(-1)))

    starts = range(0, len(blocks), at_once)
    if num_threads == 1 or len(starts) == 1:
        for first in starts:
            convert(first)
    else:
        with ThreadPoolExecutor(num_threads, "dequantise") as pool:
            list(pool.map(convert, starts))
    return out.view(shape)


def _values(blocks: Blocks, kind: Any) -> Values:
    own = OWN.get(kind.name)
    if own is not None:
        return own(blocks)
    from gguf import dequantize

    # As one long row: the library handles 16 rows at a time, which is slow for short ones.
    return np.asarray(dequantize(blocks.reshape(1, -1), kind), dtype=np.float32)
