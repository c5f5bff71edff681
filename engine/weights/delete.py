"""Removing weight files that are not needed any more."""

from __future__ import annotations

import logging
from pathlib import Path

from remora.engine.weights.files import weight_files

logger = logging.getLogger(__name__)


def delete_weights(path: Path, load_format: str = "auto") -> None:
    """Remove the files that weights were loaded from; what else is in a folder stays."""
    if load_format == "dummy":
        return
    for file in weight_files(path, load_format):
        try:
            file.unlink()
        except OSError as error:
            logger.warning("model.delete_after_load: %s stays: %s", file, error)
        else:
            logger.info("model.delete_after_load: removed %s", file)
