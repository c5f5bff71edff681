"""Downloads adapters from URLs that fsspec reads, atomically, into a local cache.

    CACHE/URL/VERSION/NAME/         adapter_config.json and adapter_model.safetensors
    CACHE/locks/                    held by the process that downloads

URL and VERSION are digests: of the URL, and of the sizes and marks (etag, time) that the file
system reports. Changed files are therefore downloaded again, and a folder in the cache is always
complete. The latest two versions of a URL are kept, as the previous one may still be read.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from remora.configs.errors import InvalidAdapter, Unavailable
from remora.lora.checksums import MANIFESTS, MAX_MANIFEST_BYTES, check_sum, parse_manifest
from remora.lora.files import CONFIG, check_size, refuse_missing, size_limits
from remora.lora.retry import RETRY_AFTER_S

_CHUNK_BYTES = 8 * 2**20
_NUM_KEPT = 2
_NUM_LOCKS = 256
# Keys with which file systems distinguish the versions of a file.
_MARKS = (
    *("ETag", "etag", "generation", "md5Hash", "content_settings", "mtime", "LastModified"),
    *("last_modified", "modified", "updated", "created", "ino"),
)
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


@dataclass(frozen=True, slots=True)
class _File:
    """A file's metadata; num_bytes is None if the file system does not report it."""

    num_bytes: int | None
    marks: str


class RemoteAdapter:
    """The files of one adapter, or of a repository of adapters, at a URL."""

    def __init__(self, url: str) -> None:
        """Raises InvalidAdapter if no installed package reads such URLs."""
        self.url = url
        self._fs, path = _file_system(url)
        self._path = path.rstrip("/")

    def stamp(self, max_bytes: int) -> str:
        """Return a digest that differs between versions of the files.

        max_bytes:  limit for the weights
        Raises InvalidAdapter if a file is missing or too large, and the file system's errors.
        """
        files = self._stat_files(max_bytes)
        return _digest(repr(sorted(files.items(), key=lambda item: item[0])))

    def fetch(self, cache: Path, *, max_bytes: int, deadline: float) -> Path:
        """Return a local folder with the current files.

        deadline:  on the monotonic clock
        Raises InvalidAdapter, Unavailable, and the file system's errors.
        """
        home = cache / _digest(self.url)
        name = re.sub(r"[^A-Za-z0-9._-]", "_", self.url.rpartition("/")[2])[:64]
        folder = home / self.stamp(max_bytes) / (name or "adapter")
        if folder.is_dir():
            return folder
        with _lock(cache, home.name, deadline):
            if not folder.is_dir():
                self._install(folder, max_bytes, deadline)
        return folder

    def subfolders(self) -> list[str]:
        """Return the names of the subfolders with an adapter's configuration."""
        self._fs.invalidate_cache()
        try:
            files = self._fs.find(self._path)
        except FileNotFoundError:
            return []
        parts = [file.removeprefix(f"{self._path}/").split("/") for file in files]
        return sorted(part[0] for part in parts if len(part) == 2 and part[1] == CONFIG)

    def _stat_files(self, max_bytes: int) -> dict[str, _File]:
        self._fs.invalidate_cache()  # of listings
        files = {}
        for name, most in size_limits(max_bytes):
            try:
                facts = self._fs.info(f"{self._path}/{name}")
            except FileNotFoundError as error:
                _refuse_unreached(error)
                refuse_missing(
                    self.url, name, lambda other: self._fs.exists(f"{self._path}/{other}")
                )
            if facts.get("type", "file") != "file":
                raise InvalidAdapter(f"{self.url}/{name} is not a file")
            size = facts.get("size")
            check_size(self.url, name, size or 0, most)
            marks = repr([(mark, str(facts[mark])) for mark in _MARKS if mark in facts])
            files[name] = _File(None if size is None else int(size), marks)
        return files

    def _install(self, folder: Path, max_bytes: int, deadline: float) -> None:
        """Create `folder`, under the lock."""
        version = folder.parent
        home = version.parent
        home.mkdir(parents=True, exist_ok=True)
        for left in home.glob(".*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=".", dir=home))
        try:
            self._copy(temporary / folder.name, max_bytes, deadline)
            if self.stamp(max_bytes) != version.name:
                raise ConnectionError("the files changed while they were read")
            temporary.chmod(0o755)
            temporary.rename(version)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):  # there are other versions
                home.rmdir()
        _drop_old(home, version)

    def _copy(self, folder: Path, max_bytes: int, deadline: float) -> None:
        folder.mkdir()
        files = self._stat_files(max_bytes)
        sums = {}
        for name, most in size_limits(max_bytes):
            num_bytes, sums[name] = self._copy_file(name, folder / name, most, deadline)
            expected = files[name].num_bytes
            if expected is not None and num_bytes != expected:
                raise ConnectionError(f"received {num_bytes} of {expected} bytes of {name}")
        self._check_sums(sums)

    def _copy_file(self, name: str, target: Path, most: int, deadline: float) -> tuple[int, str]:
        """Copy a file; return its size in bytes and its SHA-256."""
        num_bytes, digest = 0, hashlib.sha256()
        with self._fs.open(f"{self._path}/{name}", "rb") as source, target.open("xb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                num_bytes += len(chunk)
                if num_bytes > most:
                    raise InvalidAdapter(
                        f"{self.url}/{name} has more than {most} bytes, the most that is read"
                    )
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{name} took longer than lora.load_timeout_s")
                digest.update(chunk)
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())
        return num_bytes, digest.hexdigest()

    def _check_sums(self, sums: Mapping[str, str]) -> None:
        for manifest in MANIFESTS:
            path = f"{self._path}/{manifest}"
            if self._fs.exists(path):
                with self._fs.open(path, "rb") as stream:
                    expected = parse_manifest(manifest, stream.read(MAX_MANIFEST_BYTES))
                for name, found in sums.items():
                    check_sum(name, found, manifest, expected)


def _file_system(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        file_system, path = url_to_fs(url)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        advice = f"; run: pip install 'remora[{extra}]'" if extra else ""
        raise InvalidAdapter(f"{scheme}:// cannot be read here: {error}{advice}") from error
    except ValueError as error:
        raise InvalidAdapter(f"{scheme}:// cannot be read here: {error}") from error
    return file_system, str(path)


def _refuse_unreached(error: FileNotFoundError) -> None:
    """Raise the error's cause if it is the network: http:// reports all files missing then."""
    cause = error.__cause__
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
        raise cause


def _lock(cache: Path, key: str, deadline: float) -> Any:
    """Return a context manager that holds the lock of a URL among all processes of this machine."""
    folder = cache / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{int(key, 16) % _NUM_LOCKS:02x}.lock")
        return lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
    except Timeout as error:
        raise Unavailable(
            "another process still downloads this adapter after lora.load_timeout_s",
            RETRY_AFTER_S,
        ) from error
    except OSError as error:
        raise Unavailable(
            f"the cache folder {cache} cannot be written ({error.strerror}); set REMORA_CACHE to a "
            "writable folder",
            RETRY_AFTER_S,
        ) from error


def _drop_old(home: Path, current: Path) -> None:
    others = [version for version in home.iterdir() if version != current]
    others.sort(key=lambda version: version.stat().st_mtime, reverse=True)
    for old in others[_NUM_KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
