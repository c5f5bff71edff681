"""Tensors that arrive in parts, as the bytes of one safetensors file each, and are kept on disk.

A replica reads them again when it wakes, so they stay until later tensors replace all of them. The
folder of a process that has ended is removed by the next one.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.engine.live.source import LiveSource
from remora.engine.weights.files import SAFETENSORS
from remora.engine.weights.safetensors import SafetensorsWeights

FOLDER = "updates"  # in the cache directory
MAX_OPEN = 8


class Uploads:
    """The uploaded tensors of one replica.

    limit_bytes:  of one upload; None = there are none
    """

    def __init__(self, root: Path, limit_bytes: int | None) -> None:
        """Make no folder yet; remove those of processes that are gone."""
        self._root = root
        self._folder = root / f"{os.getpid()}-{secrets.token_hex(4)}"
        self.limit_bytes = limit_bytes
        self._open: dict[str, int] = {}  # bytes so far, by name
        self._num_finished = 0
        _remove_old(root)

    def add(self, name: str, offset: int, part: bytes) -> None:
        """Append a part, whose place is `offset`, to an upload. Raises ConfigError."""
        if self.limit_bytes is None:
            raise ConfigError("model.weight_upload_limit is not set: no tensors are received")
        if name not in self._open and len(self._open) >= MAX_OPEN:
            raise ConfigError(f"{MAX_OPEN} uploads are open; finish or discard one of them first")
        size = self._open.get(name, 0)
        if offset != size:
            raise ConfigError(
                f"the part begins at byte {offset:,}, and {size:,} bytes have arrived; send the "
                "parts in order, or begin again under another upload_id"
            )
        if size + len(part) > self.limit_bytes:
            self.drop(name)
            raise ConfigError(
                f"the update is larger than the {self.limit_bytes:,} bytes of "
                "model.weight_upload_limit; send fewer tensors at a time, or raise the limit"
            )
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._file(name).open("ab" if size else "wb") as file:
                file.write(part)
        except OSError as error:
            self._file(name).unlink(missing_ok=True)
            self._open.pop(name, None)
            raise ConfigError(f"the update cannot be kept on disk: {error}") from error
        self._open[name] = size + len(part)

    def finish(self, name: str) -> str:
        """Check an upload; return its folder of safetensors. Raises ConfigError, and drops it."""
        if name not in self._open:
            raise ConfigError("no bytes have arrived; send a safetensors file")
        folder = self._folder / f"{self._num_finished}"
        self._num_finished += 1
        folder.mkdir()
        self._file(name).rename(folder / SAFETENSORS.single)
        del self._open[name]
        try:
            shapes = SafetensorsWeights(folder).shapes()
            if not shapes:
                raise ConfigError("the file has no tensors")
        except ConfigError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return str(folder)

    def drop(self, name: str) -> None:
        """Forget an unfinished upload."""
        if self._open.pop(name, None) is not None:
            self._file(name).unlink(missing_ok=True)

    def adopt(self, source: LiveSource) -> LiveSource:
        """Return a source of another replica with copies of its uploads. Raises ConfigError."""
        copies = []
        for folder in source.patches:
            own = self._folder / f"{self._num_finished}"
            self._num_finished += 1
            try:
                shutil.copytree(folder, own)
            except OSError as error:
                raise ConfigError(f"the uploads of a replica cannot be read: {error}") from error
            copies.append(str(own))
        return replace(source, patches=tuple(copies))

    def keep(self, folders: Collection[str]) -> None:
        """Delete all finished uploads but these."""
        if self._folder.is_dir():
            for each in self._folder.iterdir():
                if each.is_dir() and str(each) not in folders:
                    shutil.rmtree(each, ignore_errors=True)

    def close(self) -> None:
        """Delete everything."""
        self._open.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name.encode().hex()}.part"


def _remove_old(root: Path) -> None:
    for folder in root.iterdir() if root.is_dir() else ():
        pid = folder.name.partition("-")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
    return True
