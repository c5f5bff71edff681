"""Find and end the processes below this one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

KILL_TIMEOUT_S = 8.0
_POLL_S = 0.02
# Of Linux's prctl.
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Make this process the parent of all orphans below it (Linux; elsewhere it does nothing)."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def signal_when_parent_dies(number: int) -> None:
    """Let the kernel send this signal when the parent ends (Linux; elsewhere it does nothing)."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def reap() -> dict[int, int]:
    """Collect the children that have ended: exit codes by pid, negative for signals."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):  # there are no children
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def kill_descendants(timeout_s: float = KILL_TIMEOUT_S) -> list[str]:
    """Kill all descendants, and theirs that start meanwhile; wait until they are gone.

    Returns descriptions of the processes that remain after the timeout.
    """
    import psutil  # type: ignore[import-untyped]

    deadline = time.monotonic() + timeout_s
    while True:
        reap()
        found = psutil.Process().children(recursive=True)
        if not found or time.monotonic() >= deadline:
            return [describe(process) for process in found]
        kill(found)
        time.sleep(_POLL_S)


def kill(processes: list[Any]) -> None:
    """Send SIGKILL to psutil's processes that still exist and may be killed."""
    import psutil

    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)


def is_alive(process: Any) -> bool:
    """Return whether psutil's process runs: it exists, and is no zombie."""
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def describe(process: Any) -> str:
    """Return the pid and name of psutil's process."""
    import psutil

    try:
        return f"{process.pid} ({process.name()})"
    except psutil.Error:
        return str(process.pid)
