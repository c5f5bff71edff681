"""Keeps packed weights on disk, so that a model is rounded at its first start only.

A folder belongs to one checkpoint and recipe: any other file, library or setting has another one. A
file holds the bytes of one product after checksums of their chunks. Files are written under another
name first, so that processes may share the folder. What cannot be read is packed again, and what
cannot be written is left out: no start fails. Knows bytes and names, neither formats nor layouts.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from torch import Tensor

from remora.engine.weights.files import weight_files

logger = logging.getLogger(__name__)
_Item = TypeVar("_Item")

FOLDER = "packed"  # in the cache directory
VERSION = 2  # of files
CHUNK_BYTES = 2**20  # read and checked at a time, by one thread
CHECK_BYTES = 4
LEAST_BYTES = 64 * 1024  # of a product: less takes no time to pack
READERS = "models", "weights"  # folders of the engine
MAX_LABEL = 64  # characters
LEAST_FREE = 0.05  # of the disk
UNFINISHED = ".part"
UNFINISHED_S = 3600.0  # after which the process that wrote a file is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCache:
    """The packed weights of a checkpoint.

    root:         folder of all checkpoints
    label:        begins the names of this checkpoint's folders
    identity:     differs for another or a changed checkpoint
    limit_bytes:  of all files below the root; the folders used longest ago are removed
    """

    root: Path
    label: str
    identity: str
    limit_bytes: int

    @classmethod
    def of(
        cls, path: Path, load_format: str, fingerprint: str, *, root: Path, limit_bytes: int
    ) -> Self:
        """Identify a checkpoint by its fingerprint, and the paths, sizes and times of its files."""
        said = [fingerprint]
        for file in weight_files(path, load_format):
            status = file.stat()
            said.append(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}")
        label = path.resolve().name[:MAX_LABEL]
        return cls(root=root, label=label, identity="\n".join(said), limit_bytes=limit_bytes)

    @contextmanager
    def open(self, recipe: str, num_threads: int) -> Iterator[PackedFolder]:
        """Open the folder of a recipe, and log what was read and kept at the end.

        recipe:  all that decides about the bytes besides the checkpoint
        """
        digest = hashlib.sha256(f"{VERSION}\n{self.identity}\n{recipe}".encode())
        for source in _readers():
            digest.update(source.read_bytes())
        folder = self.root / f"{self.label}-{digest.hexdigest()[:16]}"
        with ThreadPoolExecutor(num_threads, "packed") as pool:
            opened = PackedFolder(folder, self.limit_bytes, pool)
            yield opened
        opened.log()


class PackedFolder:
    """PackedStore over the files of a folder.

    num_read:  bytes that were read
    """

    num_read = 0

    def __init__(self, folder: Path, limit_bytes: int, pool: ThreadPoolExecutor) -> None:
        """List the folder, which need not exist; see `PackedCache`."""
        self._folder, self._pool = folder, pool
        self._room = _Room(folder, limit_bytes)
        self._seconds, self._num_kept, self._has_warned = 0.0, 0, False
        self._is_writable = True
        self._present: set[str] = set()
        with suppress(OSError):
            self._present = set(os.listdir(folder))
        with suppress(OSError):
            os.utime(folder)

    def has(self, key: str) -> bool:
        """Return whether there is a file; it may be damaged."""
        return key in self._present

    def fetch(self, key: str, memories: Sequence[Tensor], make: Callable[[], None]) -> bool:
        """Read a product's bytes, else make and keep them; see `PackedStore`."""
        views = [memory.numpy().data for memory in memories]
        if self.has(key) and self._read(key, views):
            return True
        make()
        if self._is_writable and sum(map(len, views)) >= LEAST_BYTES:
            self._write(key, views)
        return False

    def log(self) -> None:
        """Log how much was read and kept."""
        if self.num_read:
            logger.info(
                "read %.0f MB of packed weights from %s in %.1f s",
                self.num_read / 1e6,
                self._folder,
                self._seconds,
            )
        if self._num_kept:
            logger.info("kept %.0f MB of packed weights in %s", self._num_kept / 1e6, self._folder)

    def _read(self, key: str, views: Sequence[memoryview]) -> bool:
        """Read and check a file; if that fails, remove it and clear the memory."""
        started, path = time.perf_counter(), self._folder / key
        try:
            with path.open("rb", buffering=0) as file:
                damage = self._fill(file.fileno(), key, views)
        except FileNotFoundError:
            return False  # another process removed it for its own
        except OSError as error:
            damage = str(error)
        self._seconds += time.perf_counter() - started
        if not damage:
            self.num_read += sum(map(len, views))
            return True
        self._warn(f"{path} is damaged ({damage}): its weights are packed again")
        with suppress(OSError):
            path.unlink()
        for view in views:
            np.frombuffer(view, np.uint8)[:] = 0
        return False

    def _fill(self, file: int, key: str, views: Sequence[memoryview]) -> str:
        """Read the chunks of an open file; return what is wrong with it, or nothing."""
        chunks = list(_chunks(views))
        start = CHECK_BYTES * len(chunks)
        expected, size = start + sum(map(len, views)), os.fstat(file).st_size
        if size != expected:
            return f"it has {size:,} bytes instead of {expected:,}"
        checks = bytearray(start)
        os.preadv(file, [checks], 0)
        offsets = start + np.cumsum([0, *map(len, chunks)])

        def is_whole(number: int) -> bool:
            is_read = _read_at(file, chunks[number], int(offsets[number]))
            return is_read and _check(key, chunks[number]) == _check_at(checks, number)

        whole = self._each(is_whole, range(len(chunks)))
        return "" if all(whole) else "a checksum differs"

    def _write(self, key: str, views: Sequence[memoryview]) -> None:
        """Write a file, unless there is no room for it."""
        chunks = list(_chunks(views))
        checks = np.array(self._each(lambda chunk: _check(key, chunk), chunks), np.uint32)
        num_bytes = checks.nbytes + sum(map(len, views))
        try:
            if not self._room.make(num_bytes):
                self._is_writable = False
                logger.info("model.packed_cache: no room for more packed weights")
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            _write_whole(self._folder / key, [checks.data, *views])
        except OSError as error:
            self._is_writable = False
            self._warn(f"packed weights are not kept in {self._folder}: {error}")
            return
        self._num_kept += num_bytes

    def _each(self, function: Callable[[_Item], int], items: Sequence[_Item]) -> list[int]:
        """Map the items, in several threads if there are several."""
        return [*(self._pool.map if len(items) > 1 else map)(function, items)]

    def _warn(self, message: str) -> None:
        """Warn once: what follows has the same cause."""
        if not self._has_warned:
            logger.warning(message)
        self._has_warned = True


class _Room:
    """Keeps the files of all folders below a limit, and a share of the disk free."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Look at nothing yet; `folder`: which is not removed."""
        self._folder, self._limit = folder, limit_bytes
        self._others: list[tuple[float, Path, int]] | None = None
        self._used = 0

    def make(self, num_bytes: int) -> bool:
        """Remove the folders used longest ago until there is room for a file; count it.

        Returns whether there is room. Raises OSError.
        """
        if self._others is None:
            self._others = sorted(self._find())
        while self._used + num_bytes > self._limit and self._others:
            _, oldest, freed = self._others.pop(0)
            logger.info("model.packed_cache: removed %s", oldest)
            shutil.rmtree(oldest, ignore_errors=True)
            self._used -= freed
        disk = shutil.disk_usage(_existing(self._folder))
        leaves_some = disk.free - num_bytes >= disk.total * LEAST_FREE
        if self._used + num_bytes > self._limit or not leaves_some:
            return False
        self._used += num_bytes
        return True

    def _find(self) -> Iterator[tuple[float, Path, int]]:
        """Yield the other folders: when they were used, and their sizes; add these to the used.

        Remove files that were never finished.
        """
        root = self._folder.parent
        for folder in root.iterdir() if root.is_dir() else ():
            num_bytes, used_at = 0, 0.0
            with suppress(OSError):  # another process removes it
                used_at = folder.stat().st_mtime
                for file in folder.iterdir():
                    status = file.stat()
                    if file.suffix == UNFINISHED and status.st_mtime < time.time() - UNFINISHED_S:
                        file.unlink()
                    else:
                        num_bytes += status.st_size
            self._used += num_bytes
            if folder != self._folder:
                yield used_at, folder, num_bytes


def _readers() -> list[Path]:
    """Return the sources of the code that reads checkpoints, whose changes may change bytes."""
    engine = Path(__file__).parents[1]
    return sorted(file for room in READERS for file in (engine / room).rglob("*.py"))


def _existing(folder: Path) -> Path:
    """Return the folder, or the next one above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def _chunks(views: Sequence[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def _read_at(file: int, chunk: memoryview, offset: int) -> bool:
    """Read a chunk; return whether the file has all of it."""
    done = 0
    while done < len(chunk):
        count = os.preadv(file, [chunk[done:]], offset + done)
        if count == 0:
            return False
        done += count
    return True


def _check_at(checks: bytearray, number: int) -> int:
    return int.from_bytes(checks[CHECK_BYTES * number :][:CHECK_BYTES], sys.byteorder)


def _check(key: str, chunk: memoryview) -> int:
    """Return a checksum of a chunk, which differs in files of other products."""
    return zlib.crc32(chunk, zlib.crc32(key.encode()))


def _write_whole(path: Path, parts: Sequence[memoryview]) -> None:
    """Write a file that appears under its name when it is complete. Raises OSError."""
    temporary = path.with_name(f"{path.name}-{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with temporary.open("xb", buffering=0) as file:
            for part in parts:
                rest = part.cast("B")
                while rest:
                    rest = rest[file.write(rest) :]
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
