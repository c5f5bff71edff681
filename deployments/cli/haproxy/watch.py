"""Lets a stop-gap answer when HAProxy dies, until Serve has started another.

Serve notices by health checks that HAProxy is gone, and replaces it together with the actor that
controls it, which takes seconds in which connections are refused. The stop-gap is HAProxy with the
same configuration, without its control socket, so that Serve's checks still fail. The program that
Serve starts (`cli/haproxy/program.py`) takes the port over from it.

Both sides know two files in the run's folder: RUNNING, which the program writes before it becomes
HAProxy ("PID CONFIGURATION"), and STOP_GAP, the pid of a stop-gap that runs.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from remora.deployments.cli.terminal import answer

RUNNING, STOP_GAP = "running", "stop-gap"
POLL_S = 0.2
CONTROL_SOCKET = "stats socket"  # the beginning of its line in the configuration


class HaproxyWatch:
    """Watches the HAProxy that runs now, in a thread. Linux only; elsewhere it does nothing.

    folder:  of the run
    binary:  the program HAProxy itself
    """

    def __init__(self, folder: Path, binary: str) -> None:
        self._folder = folder
        self._binary = binary
        self._stop_gap: subprocess.Popen[bytes] | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="HAProxy watch", daemon=True)

    def __enter__(self) -> None:
        """Start to watch."""
        if sys.platform == "linux":
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Stop to watch, and end the stop-gap if there is one."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._stop_gap is not None:
            self._stop_gap.kill()
            self._reap(timeout_s=None)

    def _run(self) -> None:
        while not self._is_over.is_set():
            running = self._running()
            if running is None:
                self._is_over.wait(POLL_S)
            elif self._has_ended(running[0]) and self._running() == running:
                self._replace(running[1])
                while self._running() == running and not self._is_over.wait(POLL_S):
                    self._reap()
            self._reap()

    def _running(self) -> tuple[int, str] | None:
        """Return pid and configuration of the HAProxy that was started last."""
        with suppress(FileNotFoundError):
            pid, _, config = (self._folder / RUNNING).read_text().partition(" ")
            return int(pid), config
        return None

    def _has_ended(self, pid: int) -> bool:
        """Wait for the end of a process for POLL_S at most; return whether it has ended."""
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([process], [], [], POLL_S)[0])
        finally:
            os.close(process)

    def _replace(self, config: str) -> None:
        try:
            lines = Path(config).read_text().splitlines(keepends=True)
        except FileNotFoundError:  # the run's folder is being removed
            return
        own = self._folder / f"{STOP_GAP}.cfg"
        own.write_text("".join(line for line in lines if CONTROL_SOCKET not in line))
        # Without SO_REUSEPORT (-dR), as Serve's: it ends at once if another one has the port.
        self._stop_gap = subprocess.Popen(
            [self._binary, "-db", "-f", str(own), "-dR"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        draft = self._folder / f"{STOP_GAP}.draft"
        draft.write_text(str(self._stop_gap.pid))
        draft.rename(self._folder / STOP_GAP)
        answer("warning: HAProxy has ended; another one answers until Serve has replaced it")

    def _reap(self, timeout_s: float | None = 0.0) -> None:
        """Forget a stop-gap that has ended; its pid may then be another process's."""
        if self._stop_gap is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._stop_gap.wait(timeout_s)
            (self._folder / STOP_GAP).unlink(missing_ok=True)
            self._stop_gap = None
