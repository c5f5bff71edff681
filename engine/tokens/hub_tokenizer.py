"""The tokenizer of a model as transformers loads it, for code that expects its interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remora.configs.errors import ConfigError
from remora.configs.sections.model import ModelSection
from remora.engine.models.locate import locate_tokenizer


def transformers_tokenizer(model: ModelSection, path: Path) -> Any:
    """Load the tokenizer of the model at `path`. Raises ConfigError; never downloads code."""
    path = locate_tokenizer(model) or path
    if not path.is_dir():
        raise ConfigError(
            f"{path} has no tokenizer that transformers loads from a folder; use `tokenizer` of "
            "the LLM, or name a folder with one by tokenizer_path"
        )
    from transformers import AutoTokenizer  # slow to import

    try:
        return AutoTokenizer.from_pretrained(
            path, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # malformed files raise arbitrary exceptions
        raise ConfigError(
            f"transformers loads no tokenizer from {path}: {type(error).__name__}: {error}"
        ) from error
