"""A folder at a URL that fsspec reads: its files, their versions, and copies that can go on.

Knows no kinds of files: which ones are wanted, and how large they may be, is the caller's choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remora.engine.sources.faults import SourceFault, SourceMissing

_CHUNK_BYTES = 8 * 2**20
# Keys with which file systems distinguish the versions of a file.
_MARKS = (
    *("ETag", "etag", "generation", "md5Hash", "content_settings", "mtime", "LastModified"),
    *("last_modified", "modified", "updated", "created", "ino"),
)
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file's metadata; num_bytes is None if the file system does not report it."""

    num_bytes: int | None
    marks: str


class UrlFolder:
    """A folder at a URL; every call asks the file system again."""

    def __init__(self, url: str) -> None:
        """Raises SourceFault if no installed package reads such URLs."""
        self.url = url
        self._fs, path = _file_system(url)
        self._path = path.rstrip("/")

    def stat(self, name: str) -> RemoteFile:
        """Return a file's metadata. Raises SourceMissing, SourceFault for another kind of entry."""
        self._fs.invalidate_cache()  # of listings
        try:
            return self._facts(name, self._fs.info(f"{self._path}/{name}"))
        except FileNotFoundError as error:
            _refuse_unreached(error)
            raise SourceMissing(f"{self.url}/{name} is not there") from error

    def exists(self, name: str) -> bool:
        """Return whether there is a file of this name."""
        return bool(self._fs.exists(f"{self._path}/{name}"))

    def files(self) -> dict[str, RemoteFile]:
        """Return all files below the folder by relative name. Raises SourceMissing."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._path, detail=True)
        except FileNotFoundError as error:
            _refuse_unreached(error)
            found = {}
        if not found:
            raise SourceMissing(f"there are no files at {self.url}")
        start = f"{self._path}/"
        return {
            path.removeprefix(start): self._facts(path, facts)
            for path, facts in sorted(found.items())
            if path.startswith(start) and ".." not in path.split("/")
        }

    def subfolders(self, with_file: str) -> list[str]:
        """Return the names of the subfolders that have a file of this name."""
        self._fs.invalidate_cache()
        try:
            files = self._fs.find(self._path)
        except FileNotFoundError:
            return []
        parts = [file.removeprefix(f"{self._path}/").split("/") for file in files]
        return sorted(part[0] for part in parts if len(part) == 2 and part[1] == with_file)

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the beginning of a file."""
        with self._fs.open(f"{self._path}/{name}", "rb") as stream:
            return bytes(stream.read(most_bytes))

    def copy(self, name: str, target: Path, advance: Callable[[int], None]) -> None:
        """Copy a file; what `target` has is kept, and the copy goes on after it.

        advance:  called with the number of bytes of each chunk before it is written; may raise
        """
        with target.open("ab") as copy, self._fs.open(f"{self._path}/{name}", "rb") as source:
            if copy.tell():
                source.seek(copy.tell())
            while chunk := source.read(_CHUNK_BYTES):
                advance(len(chunk))
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())

    def _facts(self, name: str, facts: dict[str, Any]) -> RemoteFile:
        if facts.get("type", "file") != "file":
            raise SourceFault(f"{self.url}/{name} is not a file")
        size = facts.get("size")
        marks = repr([(mark, str(facts[mark])) for mark in _MARKS if mark in facts])
        return RemoteFile(None if size is None else int(size), marks)


def _file_system(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        file_system, path = url_to_fs(url)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        advice = f"; run: pip install 'remora[{extra}]'" if extra else ""
        raise SourceFault(f"{scheme}:// cannot be read here: {error}{advice}") from error
    except ValueError as error:
        raise SourceFault(f"{scheme}:// cannot be read here: {error}") from error
    return file_system, str(path)


def _refuse_unreached(error: FileNotFoundError) -> None:
    """Raise the error's cause if it is the network: http:// reports all files missing then."""
    cause = error.__cause__
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
        raise cause
