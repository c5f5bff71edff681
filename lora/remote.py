"""Copies adapters from URLs that fsspec reads into a local cache.

    CACHE/URL/VERSION/NAME/         adapter_config.json and adapter_model.safetensors

`engine/sources/` has the copies and the cache; this module chooses the files, and checks their
sizes and checksums. Changed files are copied again; the previous version is kept.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from remora.configs.errors import InvalidAdapter
from remora.engine.sources.faults import SourceMissing
from remora.engine.sources.url_folder import RemoteFile, UrlFolder
from remora.engine.sources.versions import digest_of, install, locked
from remora.lora.checksums import (
    MANIFESTS,
    MAX_MANIFEST_BYTES,
    check_sum,
    file_sum,
    parse_manifest,
)
from remora.lora.files import CONFIG, check_size, refuse_missing, size_limits


class RemoteAdapter:
    """The files of one adapter, or of a repository of adapters, at a URL."""

    def __init__(self, url: str) -> None:
        """Raises SourceFault if no installed package reads such URLs."""
        self.url = url
        self._folder = UrlFolder(url)

    def stamp(self, max_bytes: int) -> str:
        """Return a digest that differs between versions of the files.

        max_bytes:  limit for the weights
        Raises InvalidAdapter if a file is missing or too large, and the file system's errors.
        """
        files = self._stat_files(max_bytes)
        return digest_of(repr(sorted(files.items(), key=lambda item: item[0])))

    def fetch(self, cache: Path, *, max_bytes: int, deadline: float) -> Path:
        """Return a local folder with the current files.

        deadline:  on the monotonic clock
        Raises InvalidAdapter, the faults of `engine/sources/`, and the file system's errors.
        """
        home = cache / digest_of(self.url)
        name = re.sub(r"[^A-Za-z0-9._-]", "_", self.url.rpartition("/")[2])[:64]
        folder = home / self.stamp(max_bytes) / (name or "adapter")
        if folder.is_dir():
            return folder

        def fill(draft: Path) -> None:
            self._copy(draft, max_bytes, deadline)
            if self.stamp(max_bytes) != folder.parent.name:
                raise ConnectionError("the files changed while they were read")

        what = "downloading this adapter (lora.load_timeout_s)"
        with locked(cache, home.name, deadline=deadline, what=what):
            if not folder.is_dir():
                install(folder, fill)
        return folder

    def subfolders(self) -> list[str]:
        """Return the names of the subfolders with an adapter's configuration."""
        return self._folder.subfolders(CONFIG)

    def _stat_files(self, max_bytes: int) -> dict[str, RemoteFile]:
        files = {}
        for name, most in size_limits(max_bytes):
            try:
                files[name] = self._folder.stat(name)
            except SourceMissing:
                refuse_missing(self.url, name, self._folder.exists)
            check_size(self.url, name, files[name].num_bytes or 0, most)
        return files

    def _copy(self, draft: Path, max_bytes: int, deadline: float) -> None:
        files = self._stat_files(max_bytes)
        for name, most in size_limits(max_bytes):
            target = draft / name
            self._folder.copy(name, target, self._limit(name, most, deadline))
            num_bytes, expected = target.stat().st_size, files[name].num_bytes
            if expected is not None and num_bytes != expected:
                raise ConnectionError(f"received {num_bytes} of {expected} bytes of {name}")
        self._check_sums(draft, list(files))

    def _limit(self, name: str, most: int, deadline: float) -> Callable[[int], None]:
        num_bytes = 0

        def advance(count: int) -> None:
            nonlocal num_bytes
            num_bytes += count
            if num_bytes > most:
                raise InvalidAdapter(
                    f"{self.url}/{name} has more than {most} bytes, the most that is read"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} took longer than lora.load_timeout_s")

        return advance

    def _check_sums(self, draft: Path, names: list[str]) -> None:
        for manifest in MANIFESTS:
            if self._folder.exists(manifest):
                content = self._folder.read(manifest, MAX_MANIFEST_BYTES)
                expected = parse_manifest(manifest, content)
                for name in names:
                    check_sum(name, file_sum(draft / name), manifest, expected)
