"""Decides which code runs a checkpoint: remora's decoder, or transformers' on remora's KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remora.configs.errors import ConfigError
from remora.configs.planning.loading import Loading
from remora.engine.models.architectures import parse_config
from remora.engine.models.checkpoint import is_gguf, read_raw_config
from remora.engine.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Ours:
    """Remora's own decoder runs the checkpoint."""

    config: DecoderConfig
    reason: str


@dataclass(frozen=True, slots=True)
class Theirs:
    """A class of transformers runs the checkpoint.

    structure:  of `engine/fallback/structure.py`
    """

    structure: Any
    reason: str


def implementation_of(path: Path, loading: Loading) -> Ours | Theirs:
    """Return a checkpoint's implementation and the reason. Raises ConfigError if there is none.

    path:  a model folder or a .gguf file
    """
    raw = read_raw_config(path, loading.config_overrides)
    if loading.impl == "transformers":
        if is_gguf(path) and parse_config(raw).rules:
            raise ConfigError(
                f"model.impl is transformers, and {path} is a GGUF file of "
                f"{raw['architectures'][0]}: its weights are read under remora's names, and "
                "transformers has others for this architecture. Set model.impl: auto, or use the "
                "model's Hugging Face folder."
            )
        return Theirs(_structure(path, raw, loading), "model.impl is transformers")
    try:
        return Ours(parse_config(raw), "a family of ours")
    except ConfigError as error:
        if loading.impl == "remora":
            raise
        own = str(error)
    try:
        return Theirs(_structure(path, raw, loading), f"not a family of ours: {own}")
    except ConfigError as error:
        raise ConfigError(f"{own} Nor is it for transformers: {error}") from error


def _structure(path: Path, raw: dict[str, Any], loading: Loading) -> Any:
    # It loads transformers, which our own families can do without.
    from remora.engine.fallback.load import structure_of

    return structure_of(path, raw, trust_code=loading.trust_code)
