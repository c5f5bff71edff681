"""Describes a family of models in GGUF files, and reads its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from remora.configs.errors import ConfigError
from remora.engine.weights.gguf.file import GGUFFile
from remora.engine.weights.gguf.names import Names

Settings = Callable[[GGUFFile], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """How a family differs from Llama.

    architecture, model_type:  as in config.json
    settings:     further entries of config.json
    names:        of a block's parts, added to BLOCK_NAMES or replacing entries
    is_permuted:  whether rows of q and k are in the order of interleaved rotation
    norm_offset:  what the converter added to the norms' weights
    understands:  settings that `settings` reads and that are refused for other families
    """

    architecture: str
    model_type: str
    settings: Settings = lambda file: {}
    _: KW_ONLY
    names: Names = field(default_factory=dict)
    is_permuted: bool = False
    norm_offset: float = 0.0
    understands: frozenset[str] = frozenset()


def decimal(file: GGUFFile, key: str, default: float) -> float:
    """Return a number as it was before its conversion to float32."""
    return shortest(file.setting(key, default))


def shortest(value: float) -> float:
    """Undo the rounding of a decimal to float32: 9.999999747378752e-06 was 1e-05."""
    return float(str(np.float32(value)))


def whole(file: GGUFFile, key: str, default: int | None = None) -> int:
    """Return a whole number. Raises ConfigError if the file has none, or one for each layer."""
    value = file.setting(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        found = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(
            f"{file.path}: {file.architecture}.{key} {found}; it must be a whole number. "
            "Use the model's Hugging Face folder instead."
        )
    return value


def num_layers(file: GGUFFile) -> int:
    """Return the number of blocks, without the multi-token prediction blocks."""
    return whole(file, "block_count") - whole(file, "nextn_predict_layers", 0)


def head_dim(file: GGUFFile) -> int:
    """Return the size of a head's key."""
    size = whole(file, "embedding_length") // whole(file, "attention.head_count")
    return whole(file, "attention.key_length", size)


def refused(file: GGUFFile, what: str) -> ConfigError:
    """Return the error for content that cannot be read from GGUF."""
    return ConfigError(f"{file.path} {what}. Use the model's Hugging Face folder instead.")
