"""A GGUF file opened: its metadata as plain values, and where its tensors lie.

The library that reads the format is imported when a file is read: most models are not GGUF.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from remora.configs.errors import ConfigError
from remora.engine.weights.mapping import map_range


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """Where a tensor lies in its file.

    shape:   as the file has it: sizes in reverse
    kind:    a gguf.GGMLQuantizationType
    offset:  bytes from the file's start
    stored:  shape and dtype of the array that holds the blocks
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: Any
    offset: int
    num_bytes: int
    stored: tuple[tuple[int, ...], np.dtype[Any]]

    def read(self) -> np.ndarray[Any, Any]:
        """Map the tensor from its file and return its values in float32, its rows in order."""
        from gguf import dequantize

        shape, dtype = self.stored
        with self.file.open("rb") as opened:
            blocks = np.frombuffer(map_range(opened, self.offset, self.num_bytes), dtype)
        return np.asarray(dequantize(blocks.reshape(shape), self.kind), dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GGUFFile:
    """What a GGUF file holds."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]

    @property
    def architecture(self) -> str:
        """Return the name of the model's kind, which also begins its keys."""
        return str(self.metadata.get("general.architecture"))

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a setting of the model, under the architecture's prefix."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def token_setting(self, key: str, default: Any = None) -> Any:
        """Return a setting of the tokenizer."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)


def read_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file. Raises ConfigError when it is none."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ConfigError(
            f"{path} cannot be read as GGUF: {error}. Is the download complete?"
        ) from error


# The reader takes seconds for a vocabulary and keeps hundreds of thousands of small arrays; config,
# weights and tokenizer are asked for one after the other. So: read once, keep plain values.
@lru_cache(maxsize=1)
def _read(path: Path, modified_ns: int) -> GGUFFile:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    return GGUFFile(
        path=path,
        metadata={key: field.contents() for key, field in reader.fields.items()},
        tensors=tuple(
            GGUFTensor(
                file=path,
                name=tensor.name,
                shape=tuple(int(size) for size in tensor.shape),
                kind=tensor.tensor_type,
                offset=int(tensor.data_offset),
                num_bytes=int(tensor.n_bytes),
                stored=(tensor.data.shape, tensor.data.dtype),
            )
            for tensor in reader.tensors
        ),
    )
