"""Which weights requests may name: folders below the operator's roots, and his loaders."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.engine.live.source import LiveSource
from remora.engine.models.load import LOAD_FORMATS


class AllowedSources:
    """The sources of updates and the places of saved weights.

    roots:    folders, model.weight_roots
    loaders:  names of functions, model.weight_loaders
    """

    def __init__(self, roots: Iterable[str], loaders: Collection[str]) -> None:
        self._roots = [Path(root).expanduser().resolve() for root in roots]
        self._loaders = loaders

    def source(self, path: str, load_format: str | None) -> LiveSource:
        """Return the source that a request names. Raises ConfigError if it is not allowed."""
        if load_format in self._loaders:
            return LiveSource(path=path, load_format=load_format or "")
        if load_format not in (None, *LOAD_FORMATS):
            known = ", ".join((*LOAD_FORMATS, *self._loaders))
            raise ConfigError(f"load_format is {load_format!r}; this server allows {known}")
        if not self._roots:
            raise ConfigError("model.weight_roots is not set: no weights are read from files")
        found = self._below_roots(path)
        try:
            found.stat()
        except (ValueError, OSError) as error:
            raise ConfigError(f"{path!r} cannot be opened: {error}") from error
        return LiveSource(path=str(found), load_format=load_format or "auto")

    def target(self, path: str) -> Path:
        """Return the new folder that a request names. Raises ConfigError if it is not allowed."""
        if not self._roots:
            raise ConfigError("model.weight_roots is not set: no weights are written")
        return self._below_roots(path)

    def _below_roots(self, path: str) -> Path:
        try:
            found = Path(path).resolve()
        except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: a circle of links
            raise ConfigError(f"{path!r} cannot be opened: {error}") from error
        if not any(found != root and found.is_relative_to(root) for root in self._roots):
            raise ConfigError(f"{path} is below none of model.weight_roots")
        return found
