"""Run a server below two other processes, so that none of its processes outlives it.

    front          the process that the user started: forwards signals and returns the exit code
      supervisor   decides what signals, time limits and the death of other processes mean
        driver     starts Ray, whose processes are its descendants

Ray's processes have sessions of their own, and a process whose parent dies would leave the tree. On
Linux, orphans become children of the supervisor, or of the front if the supervisor has died.
Whichever of the three is killed, one is left that finds all other processes below itself, kills
them and removes their files.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from remora.configs.errors import RemoraError
from remora.deployments.cli.supervision.driver_link import DriverLink, Phase, Reports, Stopped
from remora.deployments.cli.supervision.processes import (
    adopt_orphans,
    is_alive,
    kill_descendants,
    reap,
    signal_when_parent_dies,
)
from remora.deployments.cli.supervision.run_folder import RunFolder
from remora.deployments.cli.terminal import EXIT_FAULT, Failure, answer, complain

# The server ended by itself.
EXIT_DEAD = 1
POLL_S = 0.1
# Time of the driver to remove its temporary files, and to begin a drain.
PREPARING_S, DRAIN_START_S = 2.0, 10.0
# Time of the driver to end after it has said so, and after a process died that may die with it.
ENDING_S, DYING_S = 5.0, 0.5
_WAIT_S = 0.02
_PARENT_DIED = signal.SIGUSR1
_DRAINING = "waiting for running requests to finish; press Ctrl-C again to stop now"

_Mask = set[int | signal.Signals]
Drive = Callable[[RunFolder, DriverLink], int]


def run_supervised(drive: Drive, *, address: str) -> int:
    """Run `drive` in a process below this one; return an exit code when all of them have ended.

    drive:    runs the server and returns an exit code; signals raise Stopped in it
    address:  where the server listens; recorded in the folder of the run

    Raises Failure if the folder cannot be made.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    stops = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        stops.add(signal.SIGHUP)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*stops, signal.SIGCHLD, _PARENT_DIED})
    try:
        folder = RunFolder.make(address)
        adopt_orphans()

        def supervise() -> int:
            adopt_orphans()
            os.setpgid(0, 0)  # the terminal sends Ctrl-C to the front only
            return Supervisor(drive, folder, mask).run(stops)

        code = _stand_in_front(_fork(supervise, _PARENT_DIED), stops, folder)
        os.close(folder.lock)
        while signal.sigtimedwait(stops, 0) is not None:  # further signals have come too late
            pass
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return code


def _stand_in_front(supervisor: int, stops: set[signal.Signals], folder: RunFolder) -> int:
    """Forward signals to the supervisor, and return its exit code."""
    while True:
        number = signal.sigwait({*stops, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            with suppress(ProcessLookupError):
                os.kill(supervisor, number)
        elif supervisor in (ended := reap()):
            break
    code = ended[supervisor]
    if code < 0:
        _end_rest(f"the server's supervisor was ended by {_name(-code)}", folder)
    return _positive(code)


class Supervisor:
    """Starts the driver, and waits for a reason to end the server."""

    def __init__(self, drive: Drive, folder: RunFolder, mask: _Mask) -> None:
        receiver, sender = os.pipe()
        self._driver = _fork(lambda: _run_driver(drive, folder, sender, mask), signal.SIGKILL)
        os.close(sender)
        self._folder = folder
        self._reports = Reports(receiver)
        self._watched: dict[str, Any] = {}
        self._stopped_by = 0
        self._was_ready = False
        self._is_hurried = False
        self._deadline: float | None = None

    def run(self, stops: set[signal.Signals]) -> int:
        """Wait for the end, end all other processes and return the exit code."""
        code: int | None = None
        while code is None:
            number = signal.sigtimedwait({*stops, signal.SIGCHLD, _PARENT_DIED}, POLL_S)
            self._read_reports()
            if number is not None and number.si_signo == _PARENT_DIED:
                _end_rest("the front process of the server was killed", self._folder)
                return EXIT_DEAD
            if number is not None and number.si_signo in stops:
                self._stop(number.si_signo)
            code = self._end()
        _end_rest(None, self._folder)
        return code

    def _read_reports(self) -> None:
        """Take in the driver's reports."""
        import psutil  # type: ignore[import-untyped]

        has_begun = self._reports.drain_s is not None
        self._reports.read()
        for name, pid in self._reports.watched.items():
            if name not in self._watched:
                try:
                    self._watched[name] = psutil.Process(pid)
                except psutil.NoSuchProcess:
                    self._watched[name] = None
        if self._reports.drain_s is not None and not has_begun and self._deadline is not None:
            self._deadline = time.monotonic() + self._reports.drain_s

    def _stop(self, number: int) -> None:
        """Act on a stop signal: the first one ends gracefully if possible, the second at once."""
        if self._stopped_by:
            self._is_hurried = True
            self._deadline = time.monotonic()
            return
        self._stopped_by = number
        phase = self._reports.phase
        self._was_ready = phase is Phase.READY
        if self._was_ready:
            _write(answer, f"stopping: {_DRAINING}")
        else:
            _write(complain, f"stopped by {_name(number)} before the server was ready")
        grace = {Phase.PREPARING: PREPARING_S, Phase.STARTING: 0.0, Phase.READY: DRAIN_START_S}
        self._deadline = time.monotonic() + grace[phase]
        if phase is not Phase.STARTING:
            os.kill(self._driver, signal.SIGTERM)

    def _end(self) -> int | None:
        """Return the exit code, after a line with the reason; None = the server goes on."""
        code, dead = reap().get(self._driver), self._dead()
        self._read_reports()
        if code is None and dead is not None:
            code = self._wait_for_driver()
            self._read_reports()
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        if self._stopped_by and not self._was_ready and (code is not None or is_late):
            return 128 + self._stopped_by
        if code is not None and self._reports.is_ended:
            return code
        if code is not None and (code == -signal.SIGKILL or dead is None):
            how = f"was ended by {_name(-code)}" if code < 0 else f"ended with code {code}"
            _write(complain, f"the server's driver process {how}")
            return _positive(code) or EXIT_DEAD
        if dead is not None:
            _write(complain, f"{dead} ended, and the server cannot recover from that")
            return EXIT_DEAD
        if is_late and not self._is_hurried:
            _write(complain, "the server did not stop in time")
        return 128 + self._stopped_by if is_late else None

    def _wait_for_driver(self) -> int | None:
        """Return the driver's exit code; None if it goes on after the death of another process.

        Ray's processes die with the driver's main thread, and so before the driver has ended.
        """
        deadline = time.monotonic() + (ENDING_S if self._reports.is_ended else DYING_S)
        while time.monotonic() < deadline:
            code = reap().get(self._driver)
            if code is not None:
                return code
            time.sleep(_WAIT_S)
        return None

    def _dead(self) -> str | None:
        """Return the name of a watched process that has ended."""
        watched = self._watched.items()
        return next((name for name, p in watched if p is None or not is_alive(p)), None)


def _run_driver(drive: Drive, folder: RunFolder, sender: int, mask: _Mask) -> int:
    link = DriverLink(sender)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        code = drive(folder, link)
    except (RemoraError, Failure) as error:
        complain(str(error))
        code = EXIT_FAULT
    except Stopped:
        code = EXIT_DEAD
    except Exception:  # a boundary: of the driver's process; a bug in remora or Ray
        traceback.print_exc()
        code = EXIT_DEAD
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    link.ended()
    return code


def _fork(body: Callable[[], int], death_signal: int) -> int:
    """Run `body` in a child, which gets a signal when this process dies; return its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = EXIT_DEAD
    try:
        signal_when_parent_dies(death_signal)
        if os.getppid() != parent:  # it died before the line above
            os.kill(os.getpid(), death_signal)
        code = body()
    except BaseException:  # a boundary: nothing may return into the parent's stack
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):  # a closed terminal
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_rest(reason: str | None, folder: RunFolder) -> None:
    """Kill all processes below this one, remove their files, and write the reason."""
    left = kill_descendants()
    folder.remove()
    if reason is not None:
        _write(complain, reason)
    if left:
        _write(complain, f"these processes could not be killed: {', '.join(left)}")


def _write(how: Callable[[str], None], text: str) -> None:
    with suppress(OSError):  # a closed terminal
        how(text)


def _name(number: int) -> str:
    return signal.Signals(number).name


def _positive(code: int) -> int:
    """Return the exit code as a shell reports it."""
    return 128 - code if code < 0 else code
