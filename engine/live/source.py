"""Where a set of weights can be read from, again at any time: plain data that ranks exchange."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


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
