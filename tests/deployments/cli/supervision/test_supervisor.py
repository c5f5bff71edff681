"""A server with processes like Ray's, which leave the process tree: nothing of it survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

# Its driver starts "raylet", an orphan in a session of its own, and a file; arguments:
# the phase to stay in, and what to do when it is stopped.
SERVER = '''
import os, signal, subprocess, sys, time
from pathlib import Path
from remora.deployments.cli.supervision.driver_link import Stopped
from remora.deployments.cli.supervision.supervisor import run_supervised

ORPHAN = """
import os, time
os.fork() and os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
time.sleep(600)
"""

def orphan():
    command = [sys.executable, "-c", ORPHAN]
    pipe = subprocess.Popen(command, stdout=subprocess.PIPE, text=True).stdout
    return int(pipe.readline())

def drive(folder, link):
    phase, at_stop = sys.argv[1:]
    os.environ.update(folder.environment(os.environ))
    (folder.path / "file").touch()
    raylet = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pids = {"raylet": raylet.pid, "orphan": orphan(), "driver": os.getpid()}
    if phase != "preparing":
        link.starting()
        link.watch({"Ray's raylet": raylet.pid})
    if phase == "ready":
        link.ready()
    pids["supervisor"] = os.getppid()
    print(__import__("json").dumps(pids | {"folder": str(folder.path)}), flush=True)
    try:
        time.sleep(600)
    except Stopped:
        if at_stop == "drain":
            link.draining(30)
            time.sleep(0.3)
            print("drained", flush=True)
            return 0
        if at_stop == "end slowly":  # Ray's processes die with the main thread
            link.draining(30)
            link.ended()
            raylet.kill()
            time.sleep(1.0)
            return 0
        if at_stop == "late":
            link.draining(0.5)
        if at_stop == "clean":
            print("cleaned", flush=True)
            raise
        while True:
            time.sleep(600)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where tests run under nohup
sys.exit(run_supervised(drive, address="127.0.0.1:8000"))
'''


@dataclass
class Running:
    """A server of SERVER.

    pids:    of its processes by name
    folder:  of the run
    """

    process: subprocess.Popen[str]
    pids: dict[str, int]
    folder: Path

    def end(self) -> tuple[int, list[str]]:
        """Wait for its end; return the exit code and the lines that it wrote meanwhile."""
        out, _ = self.process.communicate(timeout=20)
        return self.process.returncode, out.splitlines()

    def left(self) -> list[str]:
        """Return what is left of it."""
        names = [name for name, pid in self.pids.items() if is_running(pid)]
        return names + ["folder"] * self.folder.exists()


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(phase: str, at_stop: str = "drain") -> Running:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, phase, at_stop],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        running = Running(process, pids, Path(pids.pop("folder")))
        started.append(running)
        return running

    yield start
    for running in started:
        for pid in (running.process.pid, *running.pids.values()):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("phase", "at_stop", "numbers", "code", "lines"),
    [
        ("ready", "drain", [signal.SIGTERM], 0, ["stopping: ", "drained"]),
        ("ready", "drain", [signal.SIGHUP], 0, ["stopping: ", "drained"]),
        ("ready", "drain", [signal.SIGINT, signal.SIGINT], 130, ["stopping: "]),
        ("ready", "end slowly", [signal.SIGTERM], 0, ["stopping: "]),
        ("ready", "late", [signal.SIGTERM], 143, ["stopping: ", "error: the server did not stop"]),
        ("ready", "hang", [signal.SIGINT, signal.SIGTERM], 130, ["stopping: "]),
        ("preparing", "clean", [signal.SIGINT], 130, ["error: stopped by SIGINT", "cleaned"]),
        ("preparing", "hang", [signal.SIGTERM], 143, ["error: stopped by SIGTERM before"]),
        ("starting", "clean", [signal.SIGTERM], 143, ["error: stopped by SIGTERM before"]),
    ],
)
def test_a_signal_ends_all_processes_with_its_exit_code(
    start: Callable[..., Running],
    phase: str,
    at_stop: str,
    numbers: list[signal.Signals],
    code: int,
    lines: list[str],
) -> None:
    server = start(phase, at_stop)
    for number in numbers:
        server.process.send_signal(number)
        time.sleep(0.1 * (len(numbers) > 1))

    ended, written = server.end()

    assert ended == code, written
    assert len(written) == len(lines), written
    assert all(line.startswith(start) for line, start in zip(written, lines, strict=True)), written
    assert server.left() == []


@pytest.mark.parametrize(
    ("victim", "code", "reason"),
    [
        ("raylet", 1, "error: Ray's raylet ended"),
        ("driver", 137, "error: the server's driver process was ended by SIGKILL"),
        ("supervisor", 137, "error: the server's supervisor was ended by SIGKILL"),
    ],
)
def test_the_death_of_a_process_ends_the_others_with_the_reason(
    start: Callable[..., Running], victim: str, code: int, reason: str
) -> None:
    server = start("ready")

    os.kill(server.pids[victim], signal.SIGKILL)
    ended, (line,) = server.end()

    assert ended == code
    assert line.startswith(reason)
    assert server.left() == []


def test_the_death_of_the_front_process_ends_the_others(start: Callable[..., Running]) -> None:
    server = start("ready")

    server.process.kill()
    server.end()

    deadline = time.monotonic() + 10
    while server.left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.left() == []
