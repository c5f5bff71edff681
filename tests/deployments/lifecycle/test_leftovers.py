"""That what is left behind would be seen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployments.lifecycle.leftovers import Belongings, belongings, until_gone

HOLDER = """
import mmap, os, socket, sys, time
shm = open(sys.argv[2], "w+b")
shm.truncate(4096)
memory = mmap.mmap(shm.fileno(), 4096)
shm.close()
path = socket.socket(socket.AF_UNIX)
path.bind(sys.argv[1])
path.listen()
port = socket.create_server(("127.0.0.1", 0))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a port, a Unix socket and a mapped file of shared memory."""
    shared = Path("/dev/shm") / f"{tmp_path.name}-{tmp_path.stat().st_ino}"
    path = tmp_path / getattr(request, "param", "sock")
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", HOLDER, str(path), str(shared)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process, shared
        process.kill()
    shared.unlink(missing_ok=True)


def kinds(found: Belongings) -> list[str]:
    return [name.split()[0] for name in found.left()]


def test_everything_that_a_process_has_is_named(
    holder: tuple[subprocess.Popen[str], Path],
) -> None:
    found = belongings([holder[0].pid])

    assert kinds(found) == ["file", "file", "port", "process"]


@pytest.mark.parametrize("holder", ["ray/session_1/s", "pymp-1/s"], indirect=True)
def test_rays_own_sockets(holder: tuple[subprocess.Popen[str], Path]) -> None:
    found = belongings([holder[0].pid])

    assert kinds(found) == ["file", "port", "process"]
    assert found.files == {str(holder[1])}


def test_what_a_killed_process_leaves_is_told(
    holder: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    process, shared = holder
    found = belongings([process.pid])

    process.kill()
    process.wait()

    assert found.left() == sorted([f"file {shared}", f"file {tmp_path / 'sock'}"])
    shared.unlink()
    (tmp_path / "sock").unlink()
    assert until_gone(found.left) == []


def test_belongings_of_two_moments_are_joined() -> None:
    one = Belongings(files=frozenset({"/a"}))
    other = Belongings(ports=frozenset({1}))

    assert one | other == Belongings(files=frozenset({"/a"}), ports=frozenset({1}))
