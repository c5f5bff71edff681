"""The folder of a run, and what a killed run leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remora.deployments.cli.supervision import run_folder
from remora.deployments.cli.supervision.run_folder import RunFolder, remove_remains
from remora.deployments.cli.terminal import Failure


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty temporary directory for runs."""
    monkeypatch.setattr(run_folder, "_base", lambda _environ: str(tmp_path))
    return tmp_path


@pytest.fixture
def sleep() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """`sleep(folder)` starts a process of a run, which sleeps."""
    started: list[subprocess.Popen[bytes]] = []

    def sleep(folder: RunFolder, *, is_in_environment: bool) -> subprocess.Popen[bytes]:
        environ = dict(os.environ)
        if is_in_environment:
            environ |= folder.environment(environ)
        arguments = [] if is_in_environment else ["-f", f"{folder.path}/haproxy.cfg"]
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)", *arguments]
        started.append(subprocess.Popen(command, env=environ))
        return started[-1]

    yield sleep
    for process in started:
        process.kill()
        process.wait()


def test_a_folder_is_private_and_the_temporary_directory_of_its_processes() -> None:
    folder = RunFolder.make("127.0.0.1:8000")
    environment = folder.environment({"TMPDIR": "/usual"})

    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert environment["TMPDIR"] == str(folder.path)
    assert environment["RAY_TMPDIR"] == "/usual"
    assert environment["TORCHINDUCTOR_CACHE_DIR"].startswith("/usual/")
    assert folder.environment({"RAY_TMPDIR": "/ray"})["RAY_TMPDIR"] == "/ray"
    folder.remove()
    os.close(folder.lock)
    assert not folder.path.exists()


def test_only_a_killed_run_is_removed_with_its_processes(
    sleep: Callable[..., subprocess.Popen[bytes]], base: Path
) -> None:
    dead, living = RunFolder.make("127.0.0.1:8000"), RunFolder.make("127.0.0.1:9000")
    dead_processes = [sleep(dead, is_in_environment=value) for value in (True, False)]
    living_process = sleep(living, is_in_environment=True)
    (base / "remora-other").mkdir()  # of something else
    os.close(dead.lock)

    (line,) = remove_remains()

    assert "127.0.0.1:8000" in line
    assert "2 processes" in line
    assert [process.wait(5) for process in dead_processes] == [-9, -9]
    assert living_process.poll() is None
    assert sorted(base.iterdir()) == sorted([living.path, base / "remora-other"])
    assert remove_remains() == []
    os.close(living.lock)


def test_a_temporary_directory_without_room_is_named(
    monkeypatch: pytest.MonkeyPatch, base: Path
) -> None:
    def is_full(*_arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", is_full)

    with pytest.raises(Failure, match=rf"{base}: No space left on device.*TMPDIR"):
        RunFolder.make("127.0.0.1:8000")
    assert list(base.iterdir()) == []
