"""HAProxy is killed, and connections are served all the same, also while Serve replaces it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from remora.deployments.cli.haproxy.choice import BINARY
from remora.deployments.cli.haproxy.program import install_haproxy_program
from remora.deployments.cli.haproxy.watch import STOP_GAP, HaproxyWatch
from remora.deployments.free_ports import free_port
from tests.deployments.cli.haproxy.needs import HAPROXY, HEAD

pytestmark = HAPROXY
CONFIG = (
    HEAD
    + """\
frontend http
  bind 127.0.0.1:{port}
  {route}
  default_backend none
backend none
  http-request return status 404 content-type text/plain string none
backend replica
  server one 127.0.0.1:{replica}
"""
)


class Replica(BaseHTTPRequestHandler):
    """Answers every GET."""

    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def replica() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Replica) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Haproxy:
    """The program as Serve runs it: with a configuration of its own folder."""

    def __init__(self, folder: Path, replica: int) -> None:
        self._folder, self._replica = folder, replica
        self.port = free_port()
        (folder / "500.http").touch()

    def start(self, *, is_new: bool = False) -> subprocess.Popen[bytes]:
        """Start it; a new one does not know the replica yet, as Serve's."""
        config = self._folder / "haproxy.cfg"
        values = {"folder": self._folder, "port": self.port, "replica": self._replica}
        route = "" if is_new else "use_backend replica if TRUE"
        config.write_text(CONFIG.format(route=route, **values))
        return subprocess.Popen([os.environ[BINARY], "-db", "-f", str(config), "-dR"])

    def status(self) -> int:
        """Return the status of an answer; 0 = the connection was refused or closed."""
        with suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.port}/").status_code
        return 0

    def answers(self) -> bool:
        return self.status() == 204

    def is_controlled(self) -> bool:
        """Whether Serve's health check would pass."""
        with socket.socket(socket.AF_UNIX) as control:
            return control.connect_ex(str(self._folder / "control")) == 0


def test_a_killed_haproxy_is_stood_in_for_until_it_is_replaced(
    replica: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BINARY, os.environ.get(BINARY, ""))  # restored afterwards
    folder, node = tmp_path / "run", tmp_path / "node"
    folder.mkdir()
    node.mkdir()
    binary = install_haproxy_program(folder, host="127.0.0.1", body_timeout_s=5)
    haproxy = Haproxy(node, replica)

    with HaproxyWatch(folder, binary):
        first = haproxy.start()
        until(haproxy.answers)
        assert haproxy.is_controlled()

        first.send_signal(signal.SIGKILL)
        first.wait()
        until(haproxy.answers)
        assert not haproxy.is_controlled(), "Serve must notice that HAProxy has died"

        second = haproxy.start(is_new=True)
        until(haproxy.is_controlled)
        seen = {haproxy.status() for _ in range(20)}
        until(lambda: not (folder / STOP_GAP).exists())  # it has ended
        seen |= {haproxy.status() for _ in range(20)}
        second.send_signal(signal.SIGKILL)
        second.wait()
        until(haproxy.answers)

    assert seen == {204}
    assert haproxy.status() == 0, "the stop-gap ends with the watch"


def test_a_reload_is_not_stood_in_for(
    replica: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BINARY, os.environ.get(BINARY, ""))
    binary = install_haproxy_program(tmp_path, host="127.0.0.1", body_timeout_s=5)
    haproxy = Haproxy(tmp_path, replica)
    stood_in: list[str] = []
    monkeypatch.setattr(HaproxyWatch, "_replace", lambda _, config: stood_in.append(config))

    with HaproxyWatch(tmp_path, binary):
        first = haproxy.start()
        until(haproxy.answers)
        config = str(tmp_path / "haproxy.cfg")
        command = [os.environ[BINARY], "-db", "-f", config, "-dR", "-sf", str(first.pid)]
        second = subprocess.Popen(command)
        first.wait(10)
        until(haproxy.answers)
        second.kill()
        second.wait()
        until(lambda: bool(stood_in))

    assert stood_in == [config]
