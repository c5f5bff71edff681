"""Run `remora serve` in a child process: start it, wait until it is healthy, stop it.

The child has its own process group, so that Ctrl-C reaches only this process, which then stops it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from remora.configs.load import DEFAULT_HOST
from remora.configs.serve_file import our_application
from remora.deployments.bench.targets import Target
from remora.deployments.cli.terminal import Failure
from remora.deployments.free_ports import free_port
from remora.deployments.tls import KEYS as TLS_KEYS

START_S = 300.0
STOP_S = 60.0
_POLL_S = 0.05
_RUN = "from remora.deployments.cli.main import app; app()"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnServer:
    """A server that this process started.

    started:  start of the process, by time.perf_counter
    ready_s:  seconds from its start until it was healthy
    """

    url: str
    pid: int
    started: float
    ready_s: float
    log: Path

    def start_up_line(self) -> str | None:
        """Return the start-up phases from the replica's banner."""
        found = re.search(r"start-up\s+(.*)", self.log.read_text(errors="replace"))
        return found[1].strip() if found else None


def own_command(*arguments: str) -> list[str]:
    """Return the command line of `remora ...` with this Python."""
    return [sys.executable, "-c", _RUN, *arguments]


@contextmanager
def running_server(target: Target) -> Iterator[OwnServer]:
    """Serve the target on a free local port within the block.

    Raises Failure with the end of the log if the server does not start.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="remora-bench-") as folder:
        config, log = Path(folder) / "serve.yaml", Path(folder) / "log.txt"
        written = target.raw.get("http_options") or {}
        options = {name: written[name] for name in written.keys() - TLS_KEYS}
        options |= {"host": DEFAULT_HOST, "port": port}
        config.write_text(yaml.safe_dump({**target.raw, "http_options": options}))
        started = time.perf_counter()
        with log.open("wb") as output:
            process = subprocess.Popen(
                own_command("serve", str(config)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            url = f"http://{DEFAULT_HOST}:{port}{_prefix(target)}"
            _wait_until_healthy(process, url, log)
            yield OwnServer(
                url=url,
                pid=process.pid,
                started=started,
                ready_s=time.perf_counter() - started,
                log=log,
            )
        finally:
            _stop(process)


def _prefix(target: Target) -> str:
    return str(our_application(target.raw).get("route_prefix") or "/").rstrip("/")


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    with httpx.Client(timeout=2, verify=False) as client:  # plain HTTP: load no certificates
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise Failure(f"the server did not start: {_end_of(log)}")
            with suppress(httpx.HTTPError):
                if client.get(f"{url}/health").status_code == 200:
                    return
            time.sleep(_POLL_S)
    raise Failure(f"the server was not healthy after {START_S:g} s: {_end_of(log)}")


def _end_of(log: Path) -> str:
    """Return the error message of `remora serve`, or the last lines of its log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return reasons[-1] if reasons else "\n".join(lines[-8:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except BaseException:  # timeout, or Ctrl-C while waiting
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
