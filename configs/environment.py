"""The one place that reads environment variables of ours.

REMORA_CACHE  folder for what is made once and kept, such as the built-in model;
              default: remora/ in the user's cache folder (XDG_CACHE_HOME or ~/.cache)

The commands that ask a server read REMORA_API_KEY, the key that it wants, as an option.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder, absolute; it need not exist yet."""
    own = os.environ.get("REMORA_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    # An XDG path that is not absolute is to be ignored, says its specification.
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "remora"
