"""Parses the source of an adapter and decides whether it is below an allowed root.

    /folder  ~/folder  folder  file:///folder     a folder of this machine
    hf://OWNER/NAME  hf://OWNER/NAME@REVISION     a repository of the Hugging Face hub
    s3://BUCKET/PATH  gs://...  SCHEME://...      a folder of a file system that fsspec supports

Sources also come from API requests, so ambiguous ones are refused: no `..`, no queries, no
passwords. Opens nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

MAX_CHARACTERS = 2048
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(rf"({_WORD})/({_WORD})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,255}}))?")
_HUB_ROOT = re.compile(rf"({_WORD})(?:/({_WORD})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,255}}))?)?")
_LOCAL_SCHEMES = ("file", "local")
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A folder of this machine; a relative path is relative to the working directory."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository of the Hugging Face hub; as a root (name is None) all of an owner's.

    cache:  folder for its files; None = the hub library's own
    """

    owner: str
    name: str | None
    revision: str | None
    cache: Path | None = None

    @property
    def repo_id(self) -> str:
        """OWNER/NAME."""
        return f"{self.owner}/{self.name}"

    @property
    def shown(self) -> str:
        """The source as text, for messages."""
        return f"hf://{self.repo_id}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """A folder at a URL without a trailing slash."""

    url: str


SourcePath = LocalFolder | HubRepo | RemoteFolder


def parse_source(text: str) -> SourcePath:
    """Parse a source. Raises ValueError."""
    _check_characters(text)
    address = _ADDRESS.fullmatch(text)
    if address is None:
        return LocalFolder(Path(os.path.expanduser(text)))
    scheme, rest = address[1].lower(), address[2]
    if scheme in _LOCAL_SCHEMES:
        return LocalFolder(_path_of(rest))
    if scheme == "hf":
        return _parse_hub(rest, _HUB, "hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    return _parse_remote(scheme, rest)


def parse_root(text: str) -> SourcePath:
    """Parse a root, below which sources are allowed. Raises ValueError."""
    if text.lower().startswith("hf://"):
        _check_characters(text)
        return _parse_hub(text[5:], _HUB_ROOT, "hf://OWNER, hf://OWNER/NAME or with @REVISION")
    return parse_source(text)


def is_below(source: SourcePath, root: SourcePath) -> bool:
    """Return whether a source is a root or below it, with symbolic links resolved."""
    match source, root:
        case LocalFolder(path), LocalFolder(root_path):
            return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root_path))
        case HubRepo(), HubRepo():
            named: Sequence[str | None] = (root.owner, root.name, root.revision)
            own = (source.owner, source.name, source.revision)
            return all(part in (None, mine) for part, mine in zip(named, own, strict=True))
        case RemoteFolder(url), RemoteFolder(root_url):
            return f"{url}/".startswith(f"{root_url}/")
    return False


def climbs(text: str) -> bool:
    """Return whether a source contains `..`."""
    return ".." in re.split(r"[/\\]", unquote(text))


def shown(text: str) -> str:
    """Quote a text from outside for a message, cut to _MAX_SHOWN."""
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


def _check_characters(text: str) -> None:
    if not text.strip():
        raise ValueError("it is empty")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    if any(character < " " or character == "\x7f" for character in text):
        raise ValueError("it holds a control character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half a character (a lone surrogate)") from None


def _path_of(rest: str) -> Path:
    path = unquote(rest.removeprefix("localhost"))
    _check_characters(path)
    if not path.startswith("/"):
        raise ValueError("file:// is followed by an absolute path: file:///folder")
    return Path(path)


def _parse_hub(rest: str, pattern: re.Pattern[str], expected: str) -> HubRepo:
    match = pattern.fullmatch(rest.removesuffix("/"))
    if match is None or ".." in rest:
        raise ValueError(f"expected {expected}")
    owner, name, revision = match.groups()
    return HubRepo(owner, name, revision)


def _parse_remote(scheme: str, rest: str) -> RemoteFolder:
    if "::" in rest:
        raise ValueError("chained URLs (::) are not supported")
    if any(character in rest for character in "?#\\"):
        raise ValueError("a folder's URL has no ?, # or backslash")
    host, *parts = rest.rstrip("/").split("/")
    if not (host or parts):
        raise ValueError(f"expected {scheme}:// and what follows it")
    if "@" in host and ":" in host:
        raise ValueError(
            "passwords are not allowed in URLs; give them to the library of that file system "
            "(for s3:// in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws)"
        )
    if climbs(rest) or any(unquote(part) in ("", ".") for part in parts):
        raise ValueError("a URL has no empty parts, no . and no ..")
    return RemoteFolder(f"{scheme}://{'/'.join((host, *parts))}")
