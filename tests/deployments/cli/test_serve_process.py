"""`remora serve` as a user runs it: it starts, answers, and leaves no process after a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from remora.deployments.free_ports import free_port
from tests.conftest import TinyCheckpoints

pytestmark = pytest.mark.ray


def until_ready(process: subprocess.Popen[str], url: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    process.kill()
    pytest.fail(f"not ready: {process.communicate()[0]}")


def still_running(group: int) -> list[str]:
    """Return the command lines of the live processes of a session."""
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == group and state != "Z":
                    left.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return left


def test_a_folder_is_served_until_a_signal_and_no_process_is_left(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    port = free_port()
    printed = tmp_path / "output.txt"
    command = [str(Path(sys.executable).with_name("remora")), "serve"]
    with printed.open("w") as out:
        process = subprocess.Popen(
            [*command, str(tiny_checkpoints("llama")), "--port", str(port), "--model-name", "m"],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONWARNINGS": "default"},
        )
    url = f"http://127.0.0.1:{port}"
    until_ready(process, url)
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "model": "m"}, timeout=60)
    # It answers a moment before it knows that it is ready, and a signal then stops its start.
    while "ready in" not in printed.read_text():
        assert process.poll() is None, printed.read_text()
        time.sleep(0.05)
    # SIGTERM rather than SIGINT, because Ray installs a handler of its own for it.
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=90)
    output = printed.read_text()

    assert answer.status_code == 200
    assert process.returncode == 0, output
    assert "first token" in output
    assert "stopping" in output
    assert "Traceback" not in output
    assert "(raylet)" not in output
    assert still_running(process.pid) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
