"""The installed version, whose file is read once: answers hold it also while none can be opened."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version


@cache
def remora_version() -> str:
    """Return the version of the installed distribution."""
    return version("remora")
