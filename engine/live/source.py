"""Where a set of weights can be read from, again at any time: plain data that ranks exchange."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from remora.configs.errors import ConfigError
from remora.engine.weights.files import weight_files

Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSource:
    """One set of weights of the served model.

    path:         a folder or GGUF file, or the argument of a loader; None = there is none, so that
                  the patches are all tensors
    load_format:  of `path`, or the name of a loader
    patches:      folders of safetensors files, whose tensors replace those of the same names; the
                  last one that has a name counts
    """

    path: str | None
    load_format: str = "auto"
    patches: tuple[str, ...] = ()

    def patched(self, folder: str) -> Self:
        """Return the same weights with the tensors of another folder."""
        return replace(self, patches=(*self.patches, folder))


NOTHING = LiveSource(path=None)


def stamp_of(source: LiveSource | None) -> Stamp:
    """Return names, sizes and times of the source's own files, by which a change of them shows.

    Patches are not among them: nothing else writes to their folders. Files that cannot be read,
    and a loader's, have no stamp.
    """
    if source is None or source.path is None:
        return ()
    with suppress(OSError, ConfigError):
        return tuple(
            (file.name, status.st_size, status.st_mtime_ns)
            for file in weight_files(Path(source.path), source.load_format)
            for status in (file.stat(),)
        )
    return ()
