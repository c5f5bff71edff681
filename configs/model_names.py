"""Names of models that are somewhere else than on this machine, as text.

    OWNER/NAME  OWNER/NAME@REVISION           a repository of the Hugging Face hub; also hf://...
    OWNER/NAME:Q4_K_M  OWNER/NAME:FILE.gguf   a GGUF file in it, by its quantisation or its name
    s3://BUCKET/PATH  SCHEME://...            a folder or a .gguf file of a file system

Everything else is a path or a built-in name; a slash at the end of a repository's name is left out.
A path of this machine that looks like OWNER/NAME takes precedence where the machine's files are
known, which is not here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(
    rf"(?P<owner>{_WORD})/(?P<name>{_WORD})(?<!\.gguf)"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{0,255}))?"
    r"(?::(?P<file>[A-Za-z0-9][A-Za-z0-9._/-]{0,255}))?"
)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.+", re.DOTALL)
_LOCAL_SCHEMES = ("file", "local")
_HUB_SCHEME = "hf://"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model in a repository of the Hugging Face hub.

    file:  quantisation or name of a GGUF file in it; None = the repository's own weights
    """

    owner: str
    name: str
    revision: str | None = None
    file: str | None = None

    @property
    def repo_id(self) -> str:
        """OWNER/NAME."""
        return f"{self.owner}/{self.name}"

    @property
    def text(self) -> str:
        """The name as text, which `parse_model_name` reads."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo_id}{revision}{f':{self.file}' if self.file else ''}"

    def at(self, commit: str) -> HubModel:
        """Return the same model at a commit."""
        return replace(self, revision=commit)


@dataclass(frozen=True, slots=True)
class UrlModel:
    """A model in a folder, or a .gguf file, at a URL."""

    url: str

    @property
    def text(self) -> str:
        """The name as text."""
        return self.url


def parse_model_name(text: str) -> HubModel | UrlModel | None:
    """Return the remote model that a name means; None for a path or a built-in name.

    Malformed URLs are returned, too; opening them explains the fault.
    """
    is_marked = text.lower().startswith(_HUB_SCHEME)
    name = (text[len(_HUB_SCHEME) :] if is_marked else text).removesuffix("/")
    hub = _HUB.fullmatch(name)
    if hub is not None and ".." not in text:
        return HubModel(**hub.groupdict())
    url = _URL.fullmatch(text)
    if url is not None and url[1].lower() not in _LOCAL_SCHEMES:
        return UrlModel(text.rstrip("/"))
    return None
