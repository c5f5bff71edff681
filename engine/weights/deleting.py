"""Removing weight files that are not needed any more."""

from __future__ import annotations

import logging
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.engine.weights.safetensors import find_files

logger = logging.getLogger(__name__)


def delete_weights(path: Path) -> None:
    """Remove the weight files of a folder, or a GGUF file; what else is there stays."""
    try:
        files = [path] if path.is_file() else find_files(path)
    except ConfigError:
        return  # it has none, as with load_format dummy
    for file in files:
        try:
            file.unlink()
        except OSError as error:
            logger.warning("model.delete_after_load: %s stays: %s", file, error)
        else:
            logger.info("model.delete_after_load: removed %s", file)
