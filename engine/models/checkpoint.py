"""Reads the config of a model path: a folder with config.json, or a .gguf file with metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.models.architectures import parse_config
from remora.engine.models.config import DecoderConfig


def is_gguf(path: Path) -> bool:
    """Return whether the path is a GGUF file."""
    return path.suffix == ".gguf"


QUANTIZATION = "quantization_config"
NO_OVERRIDES: Mapping[str, Any] = {}


def read_raw_config(path: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> dict[str, Any]:
    """Return config.json, or its equivalent for a GGUF file.

    overrides:  entries that replace the checkpoint's
    """
    return _with_quantization(path, {**_read_raw_config(path), **overrides})


def _with_quantization(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose quantization_config is set if the weights are quantised.

    Others write it under an older key, for the text model only, or to a file of its own.
    """
    text = raw.get("text_config")
    inside = text.get(QUANTIZATION) if isinstance(text, Mapping) else None
    found = raw.get(QUANTIZATION) or inside or raw.get("compression_config")
    if not found and any(path.glob("*quant*.json")):
        # It loads torch, which a reader of other configs can do without.
        from remora.engine.weights.formats.registry import settings_in_files

        found = settings_in_files(path)
    if found and not isinstance(found, Mapping):
        raise ConfigError(f"{QUANTIZATION} in config.json is {found!r}; expected an object.")
    return {**raw, QUANTIZATION: found} if found else raw


def _read_raw_config(path: Path) -> dict[str, Any]:
    if is_gguf(path):
        if not path.is_file():
            raise ConfigError(f"{path} does not exist.")
        # It loads torch, which a reader of config.json can do without.
        from remora.engine.weights.gguf.config import read_gguf_config

        return read_gguf_config(path)
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist; expected a folder with config.json.")
    file = path / "config.json"
    if not file.is_file():
        inside = sorted(entry.name for entry in path.glob("*.gguf"))
        hint = f" It holds {inside[0]}: give the path of that file." if inside else ""
        raise ConfigError(f"{path} has no config.json, so it is no model folder.{hint}")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} holds {type(raw).__name__}; expected an object.")
    return raw


def read_config(path: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> DecoderConfig:
    """Parse the config of a folder or GGUF file; `overrides` as in `read_raw_config`."""
    return parse_config(read_raw_config(path, overrides))
