"""Run `remora serve` in a child process: start, inspect, change and stop it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

from remora.deployments.free_ports import free_port

REPLICA, WORKER, GATEWAY, ROUTING_SERVICE = (
    "ray::ServeReplica:remora:LLMServer",
    "ray::EngineWorker",
    "ray::ServeReplica:remora:Gateway",
    "ray::ServeReplica:remora:RoutingService",
)
PROXY, CONTROLLER, HAPROXY = "ray::ProxyActor", "ray::ServeController", "haproxy"
START_TIMEOUT_S = 240.0
_CHANGES = re.compile(r"serve deploy -a (http://\S+) FILE")


def make_serve_config(model: Path, **sections: Any) -> dict[str, Any]:
    """Return the Serve config of a tiny model on a free port."""
    port = free_port()
    args = {
        "model": {"path": str(model), "served_name": "m", "dtype": "float32"},
        "engine": {"kv_tokens": 32_768, "num_threads": 1, **sections.pop("engine", {})},
        "parallel": {"cpus_per_rank": 0.1, **sections.pop("parallel", {})},
        **sections,
    }
    return {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {"name": "remora", "import_path": "remora.deployments.app:build", "args": args}
        ],
    }


@dataclass(eq=False)
class Server:
    """A running `remora serve`.

    config:  the Serve config it was started with
    output:  file with its output
    """

    process: subprocess.Popen[bytes]
    config: Mapping[str, Any]
    output: Path

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.config['http_options']['port']}"

    def says(self) -> str:
        """Return its output so far."""
        return self.output.read_text(errors="replace")

    def says_itself(self) -> str:
        """Return its output so far without the lines that Ray forwards from other processes."""
        lines = self.says().splitlines(keepends=True)
        return "".join(line for line in lines if not re.match(r"(\x1b\[\d+m)?\(.+ pid=\d+", line))

    def pids(self, title: str) -> list[int]:
        """Return its processes whose command line starts with `title`, oldest first."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [p.pid for p in sorted(family, key=lambda p: p.pid) if _title(p).startswith(title)]

    @property
    def application(self) -> dict[str, Any]:
        """Serve's current status of the application."""
        answer = self._ask("GET")
        found: dict[str, Any] = answer.json()["applications"]["remora"]
        return found

    def replicas(self, deployment: str = "LLMServer") -> list[dict[str, Any]]:
        """Return Serve's status of the replicas."""
        found: list[dict[str, Any]] = self.application["deployments"][deployment]["replicas"]
        return found

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Deploy a config, as `serve deploy` does."""
        self._ask("PUT", json=config).raise_for_status()

    def until(self, is_so: Callable[[], bool], timeout_s: float = 120.0) -> float:
        """Wait until the condition holds; return the seconds. Connection errors count as false."""
        began = time.monotonic()
        while time.monotonic() < began + timeout_s:
            try:
                if is_so():
                    return time.monotonic() - began
            except (httpx.HTTPError, KeyError, psutil.Error):
                pass
            time.sleep(0.05)
        raise TimeoutError(
            f"condition is false after {timeout_s} s; output:\n{self.says()[-3000:]}"
        )

    def is_settled(self) -> bool:
        """Whether exactly the target replicas run."""
        application = self.application
        return application["status"] == "RUNNING" and all(
            [replica["state"] for replica in deployment["replicas"]]
            == ["RUNNING"] * deployment["target_num_replicas"]
            for deployment in application["deployments"].values()
        )

    def stop(self, timeout_s: float = 120.0) -> int:
        """Stop it, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def _ask(self, method: str, **content: Any) -> httpx.Response:
        match = _CHANGES.search(self.says())
        assert match is not None, self.says()
        token = (Path.home() / ".ray" / "auth_token").read_text().strip()
        return httpx.request(
            method,
            f"{match[1]}/api/serve/applications/",
            headers={"authorization": f"Bearer {token}"},
            timeout=30,
            **content,
        )


def _title(process: psutil.Process) -> str:
    try:
        command = process.cmdline()
    except psutil.Error:
        return ""
    return Path(command[0]).name if command and HAPROXY in command[0] else " ".join(command)


@contextmanager
def running(config: Mapping[str, Any], folder: Path, *, proxy: str = "python") -> Iterator[Server]:
    """Run a server with this Serve config within the block."""
    path, output = folder / "serve.yaml", folder / "output.txt"
    path.write_text(json.dumps(config))
    command = [str(Path(sys.executable).with_name("remora")), "serve", str(path), "--proxy", proxy]
    with output.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(process, config, output)
    family: list[psutil.Process] = []
    try:
        server.until(
            lambda: _CHANGES.search(server.says()) is not None or process.poll() is not None,
            START_TIMEOUT_S,
        )
        assert process.poll() is None, server.says()
        server.until(lambda: httpx.get(f"{server.url}/health", timeout=5).is_success)
        yield server
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                for member in family:
                    if member.is_running():
                        member.kill()
                process.kill()
                process.wait()


def kill(pid: int, number: int) -> None:
    """Send a signal to a process, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
