"""All checkpoint formats, and which one a checkpoint has."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.engine.weights.formats import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    mxfp4,
    torchao,
)
from remora.engine.weights.formats.stored import Format, Settings

FORMATS: tuple[Format, ...] = (
    awq.FORMAT,
    gptq.FORMAT,
    auto_round.FORMAT,
    compressed_tensors.FORMAT,
    fp8.FORMAT,
    fp8.FBGEMM,
    modelopt.FORMAT,
    mxfp4.FORMAT,
    bitsandbytes.FORMAT,
    torchao.FORMAT,
)


def check_settings(settings: Settings) -> None:
    """Raise ConfigError if a checkpoint with these settings cannot be read."""
    if settings:
        format_of(settings).check(settings)


def format_of(settings: Settings) -> Format:
    """Return a checkpoint's format. Raises ConfigError if it is not read."""
    method = str(settings.get("quant_method") or "").lower().replace("_", "-")
    for known in FORMATS:
        if method in known.methods or (not method and known.key and known.key in settings):
            return known
    found = method or "an unnamed format"
    names = ", ".join(known.name for known in FORMATS)
    raise ConfigError(
        f"config.json has a quantization_config of {found}, which is not read; formats read are "
        f"{names}, and GGUF files. Use the original checkpoint, or one in these formats."
    )


def check_format(path: Path, settings: Settings, allowed: Collection[str]) -> None:
    """Raise ConfigError unless a checkpoint has one of the allowed formats.

    settings:  of the checkpoint; {} = it is not quantised, or a GGUF file
    allowed:   names of formats; none = any, also none
    """
    found = format_of(settings).name if settings else ""
    if not allowed or found in allowed:
        return
    plain = "GGUF blocks" if path.suffix == ".gguf" else "weights that are not quantised"
    raise ConfigError(
        f"{path} has {found or plain}, and model.checkpoint_formats (or another server's "
        f"--quantization) says {' or '.join(allowed)}: leave it out to serve this checkpoint, or "
        "name one in that format. model.quantization rounds weights that are not quantised"
    )


def settings_in_files(folder: Path) -> Settings:
    """Return the settings of a checkpoint that has none in config.json; {} if it is unquantised."""
    for known in FORMATS:
        file = folder / known.file
        if not known.file or not file.is_file():
            continue
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{file} is not valid JSON: {error}.") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{file} holds {type(content).__name__}; expected an object.")
        return known.from_file(content)
    return {}
