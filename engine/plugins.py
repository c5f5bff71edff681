"""Imports the operator's code by the paths in the configuration."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from remora.configs.errors import ConfigError


def import_callable(where: str, path: str) -> Callable[..., Any]:
    """Import `module:attribute`. Raises ConfigError, whose message begins with `where`."""
    module, colon, attribute = path.partition(":")
    if not colon or not module or not attribute:
        raise ConfigError(f"{where}: expected module:attribute, such as my_package.edits:no_digits")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # the operator's module may raise anything
        raise ConfigError(
            f"{where}: cannot be imported: {error}; it must be on the Python path of the replica"
        ) from error
    if not callable(found):
        raise ConfigError(f"{where}: expected a function or a class, found {found!r}")
    function: Callable[..., Any] = found
    return function
