"""Deletes the weight files of a checkpoint after they are loaded."""

from __future__ import annotations

import logging
from pathlib import Path

from remora.engine.weights.files import weight_files

logger = logging.getLogger(__name__)


def delete_weights(path: Path, load_format: str = "auto") -> None:
    """Delete the weight files; other files of the folder stay."""
    if load_format == "dummy":
        return
    for file in weight_files(path, load_format):
        try:
            stored = file.resolve()
            file.unlink()
            if stored != file and stored.parent.name == "blobs":  # in the hub's cache
                stored.unlink()
        except OSError as error:
            logger.warning("model.delete_after_load: %s stays: %s", file, error)
        else:
            logger.info("model.delete_after_load: removed %s", file)
