"""Reads REMORA_CACHE: the cache directory, for example of the built-in model.

Default: remora/ in the user's cache directory (XDG_CACHE_HOME or ~/.cache). Client commands read
REMORA_API_KEY as an option.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the absolute path of the cache directory, which may not exist yet."""
    own = os.environ.get("REMORA_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    # The XDG specification says to ignore relative paths.
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "remora"
