"""The tensors of a source as the bytes of one safetensors file, any range of which can be read.

The file is never written: its header is built once, and a range is read from the source's files.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.protocols import WeightSource
from remora.engine.weights.safetensors import HEADER_START, STORED

_NAMES = {dtype: name for name, dtype in STORED.items()}
_ALIGNMENT = 8  # of the first tensor
_METADATA = "__metadata__"


class SharedFile:
    """The file; its parts may be read in several threads.

    header:       its first bytes, up to the first tensor
    total_bytes:  of the whole file
    """

    def __init__(self, weights: WeightSource, metadata: Mapping[str, str]) -> None:
        """Look at all tensors. Raises ConfigError for dtypes that the format does not have."""
        self._weights = weights
        kinds = [
            (name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in weights.read(weights.shapes().keys())
        ]
        # Wide elements first, so that every tensor is aligned.
        kinds.sort(key=lambda kind: (-kind[1].itemsize, kind[0]))
        entries: dict[str, object] = {_METADATA: dict(metadata)}
        ends = [0]
        for name, dtype, shape in kinds:
            if dtype not in _NAMES:
                raise ConfigError(f"{name} is stored as {dtype}, which safetensors files have not")
            ends.append(ends[-1] + torch.Size(shape).numel() * dtype.itemsize)
            entries[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": ends[-2:],
            }
        text = json.dumps(entries).encode()
        text += b" " * (-(HEADER_START + len(text)) % _ALIGNMENT)
        self.header = len(text).to_bytes(HEADER_START, "little") + text
        self._names = [kind[0] for kind in kinds]
        self._starts = [len(self.header) + end for end in ends[:-1]]
        self._sizes = [end - start for start, end in pairwise(ends)]
        self.total_bytes = len(self.header) + ends[-1]
        self._last: tuple[int, memoryview] | None = None

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes of [start, end), which lie in the file. Raises ConfigError."""
        content = bytearray(self.header[start:end])
        place = max(0, bisect_right(self._starts, max(start, len(self.header))) - 1)
        while len(content) < end - start:
            first = start + len(content) - self._starts[place]
            content += self._tensor(place)[first : end - self._starts[place]]
            place += 1
        if end == self.total_bytes:
            self._last = None
        return bytes(content)

    def _tensor(self, place: int) -> memoryview:
        """Return a tensor's bytes; the last one is kept, because parts are read in order."""
        last = self._last
        if last is not None and last[0] == place:
            return last[1]
        name = self._names[place]
        found = dict(self._weights.read({name})).get(name)
        if found is None or found.nbytes != self._sizes[place]:
            raise ConfigError(f"the file of {name} changed while it was read")
        memory = _bytes_of(found)
        self._last = place, memory
        return memory


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
