"""The folder of one run of `remora serve`, and the removal of what a killed run left behind.

The folder is the temporary directory of all processes of the run, so that whatever they leave there
is removed with it. Their environment names it, which tells them from processes of other servers. A
lock on a file in it is held while the run lives.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remora.deployments.cli.supervision.processes import is_alive, kill
from remora.deployments.cli.terminal import Failure

PREFIX = "remora-"
# HAProxy allows paths of sockets of 97 bytes, of which Serve takes 57 for a node's folder.
LONGEST_BASE = 22
_LOCK = "run.lock"
_RESERVE_BYTES = 16 << 20
_KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A locked folder, private to this user. The lock ends with the last process that holds it.

    lock:  file descriptor, which child processes inherit until they execute a program
    """

    path: Path
    lock: int

    @classmethod
    def make(cls, address: str) -> RunFolder:
        """Make the folder of a run that will listen at `address`.

        Raises Failure if the temporary directory cannot be written or is full.
        """
        base = _base(os.environ)
        try:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        except OSError as error:
            raise _unusable(base, error) from None
        try:
            draft = path / f".{_LOCK}"
            lock = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.posix_fallocate(lock, 0, _RESERVE_BYTES)
            os.truncate(lock, 0)
            os.write(lock, address.encode())
            draft.rename(path / _LOCK)  # locked before others can see it
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise _unusable(base, error) from None
        return cls(path, lock)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that make it the temporary directory of processes and of libraries.

        Ray's logs and compiled code outlive the run, so they stay where they are without it.
        """
        usual = environ.get("TMPDIR", "/tmp")
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        kept = {
            "RAY_TMPDIR": usual,
            "TORCHINDUCTOR_CACHE_DIR": f"{usual}/torchinductor_{user}",
        }
        return {name: environ.get(name, value) for name, value in kept.items()} | {
            "TMPDIR": str(self.path)
        }

    def remove(self) -> None:
        """Remove it with all files in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def remove_remains() -> list[str]:
    """Kill the processes and remove the folders of runs of this user that have been killed.

    Returns a line for each run.
    """
    lines = []
    for path in sorted(Path(_base(os.environ)).glob(f"{PREFIX}*")):
        with suppress(OSError):
            lock = _take_over(path)
            if lock is None:
                continue
            try:
                address = os.read(lock, 256).decode(errors="replace")
                found = list(set(_processes_of(path)))
                _end(found)
                shutil.rmtree(path, ignore_errors=True)
                lines.append(
                    f"removed the remains of a killed server ({address}): "
                    f"{len(found)} processes and the folder {path}"
                )
            finally:
                os.close(lock)
    return lines


def _base(environ: Mapping[str, str]) -> str:
    """Return the directory of runs' folders: TMPDIR, unless its path is too long for sockets."""
    named = environ.get("TMPDIR", "")
    return named if 0 < len(os.fsencode(named)) <= LONGEST_BASE else "/tmp"


def _unusable(base: str, error: OSError) -> Failure:
    return Failure(
        f"cannot write to the temporary directory {base}: {error.strerror or error}; it needs "
        f"{_RESERVE_BYTES >> 20} MiB. Free some space there, or set TMPDIR to another directory "
        f"(a path of at most {LONGEST_BASE} bytes)"
    )


def _take_over(path: Path) -> int | None:
    """Lock the folder of a run that has ended; return the lock, None if it is none or lives."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if path.lstat().st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _processes_of(path: Path) -> Iterator[Any]:
    """Yield psutil's processes whose environment or command line names the folder, and theirs."""
    import psutil  # type: ignore[import-untyped]

    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_named = any(f"{path}/" in argument for argument in process.cmdline())
            if is_named or process.environ().get("TMPDIR") == str(path):
                yield process
                yield from process.children(recursive=True)  # a title may replace the environment


def _end(processes: list[Any]) -> None:
    kill(processes)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
