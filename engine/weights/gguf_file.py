"""A GGUF file opened: its metadata as plain values, its tensors mapped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from gguf import GGUFReader, ReaderTensor

from remora.configs.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GGUFFile:
    """What a GGUF file holds. The tensors' data are views of the mapped file, still quantised."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[ReaderTensor, ...]

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
    reader = GGUFReader(path)
    return GGUFFile(
        path=path,
        metadata={key: field.contents() for key, field in reader.fields.items()},
        tensors=tuple(reader.tensors),
    )
