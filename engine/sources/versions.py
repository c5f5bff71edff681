"""A cache of folders on this machine, by source and version; a folder is complete or not there.

    CACHE/SOURCE/VERSION/NAME/    the files
    CACHE/SOURCE/.VERSION/        a copy that is being made
    CACHE/SOURCE/...              files that the caller adds
    CACHE/locks/                  held by the process that makes one

SOURCE is a digest. Folders are installed by a rename. Knows nothing of networks.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from remora.engine.sources.faults import SourceUnreachable

_NUM_KEPT = 2  # the previous version may still be read
_NUM_LOCKS = 256


def digest_of(text: str) -> str:
    """Return a short digest, as a name for a folder."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextmanager
def locked(cache: Path, key: str, *, deadline: float, what: str) -> Iterator[None]:
    """Hold the lock of a source among all processes of this machine.

    key:       a digest
    deadline:  on the monotonic clock
    what:      name of the work, for messages
    Raises SourceUnreachable.
    """
    folder = cache / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{int(key, 16) % _NUM_LOCKS:02x}.lock")
        wait_s = max(0.0, deadline - time.monotonic())
        lock.acquire(timeout=-1 if wait_s == float("inf") else wait_s)
    except Timeout as error:
        raise SourceUnreachable(f"another process is still {what} at the time limit") from error
    except OSError as error:
        raise SourceUnreachable(
            f"the cache folder {cache} cannot be written ({error.strerror}); set REMORA_CACHE to a "
            "writable folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def install(folder: Path, fill: Callable[[Path], None], *, resumes: bool = False) -> None:
    """Let `fill` make the files of `folder` (SOURCE/VERSION/NAME) in a folder that replaces it.

    resumes:  whether `fill` continues what a former call left; otherwise it starts anew
    Call it under the lock of the source. Older versions, and what killed processes left of them,
    are removed.
    """
    version = folder.parent
    home = version.parent
    draft = home / f".{version.name}"
    for left in home.glob(".*"):
        if not (resumes and left == draft):
            shutil.rmtree(left, ignore_errors=True)
    (draft / folder.name).mkdir(parents=True, exist_ok=True)
    try:
        fill(draft / folder.name)
        draft.rename(version)
    except BaseException:
        if not resumes:
            shutil.rmtree(draft, ignore_errors=True)
            with suppress(OSError):  # there are other versions
                home.rmdir()
        raise
    _drop_old(home, version)


def _drop_old(home: Path, current: Path) -> None:
    others = [version for version in home.iterdir() if version.is_dir() and version != current]
    others.sort(key=lambda version: version.stat().st_mtime, reverse=True)
    for old in others[_NUM_KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
