"""A checkpoint's recommendations for generation: sampling defaults and end-of-sequence ids.

Read from `generation_config.json`. Sampling is on unless the caller sets temperature 0 or the
checkpoint has `"do_sample": false`. GGUF files have no such settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remora.configs.errors import ConfigError, InvalidSampling
from remora.engine.types import SamplingParams

FILE_NAME = "generation_config.json"
# Names in the file -> names of SamplingParams.
SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
WHOLE_NUMBERS = ("top_k", "max_new_tokens")


def read_generation_defaults(path: Path) -> dict[str, float | int]:
    """Return the sampling values of a checkpoint folder, by SamplingParams' names.

    Raises ConfigError for a value that SamplingParams refuses.
    """
    found = _read_json(path / FILE_NAME)
    defaults = {
        ours: _number(path, theirs, found[theirs])
        for theirs, ours in SAMPLING_NAMES.items()
        if found.get(theirs) is not None
    }
    if found.get("do_sample") is False:
        defaults["temperature"] = 0.0
    if defaults.get("top_k", 0) < 0:  # -1 commonly means "off"
        defaults["top_k"] = 0
    try:
        SamplingParams(**defaults)  # type: ignore[arg-type]
    except InvalidSampling as error:
        raise ConfigError(f"{path / FILE_NAME}: {error}") from error
    return defaults


def read_eos_token_ids(path: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of a checkpoint folder, in addition to its tokenizer's.

    As in transformers, `config.json` is used only if there is no generation_config.json.
    """
    found = _read_json(path / FILE_NAME) or _read_json(path / "config.json")
    ids = found.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _number(path: Path, name: str, value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path / FILE_NAME}: {name} is {value!r}; a number is expected.")
    return int(value) if name in WHOLE_NUMBERS else value


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}; an object is expected.")
    return value
