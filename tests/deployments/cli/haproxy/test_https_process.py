"""`remora serve` with HTTPS and below a proxy's path, through each of Serve's proxies."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from remora.configs.serve_file import config_of_args
from remora.deployments.free_ports import free_port
from tests.conftest import TinyCheckpoints
from tests.deployments.cli.test_serve_process import still_running
from tests.deployments.https.certificates import Authority, serial_at

pytestmark = [pytest.mark.ray, pytest.mark.slow]
COMMAND = [str(Path(sys.executable).with_name("remora")), "serve"]


@contextmanager
def serving(file: Path, proxy: str, port: int) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Serve a file in the block; yield the process and the file with its output."""
    output = file.with_name("output.txt")
    with output.open("w") as out:
        process = subprocess.Popen(
            [*COMMAND, str(file), "--proxy", proxy, "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield process, output
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)


def until_printed(output: Path, text: str) -> str:
    deadline = time.monotonic() + 120
    while text not in output.read_text():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)
    return output.read_text()


@pytest.mark.observes("http.root_path")
@pytest.mark.parametrize("proxy", ["haproxy", "python"])
def test_clients_speak_https_and_links_have_the_outer_path(
    proxy: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    first = authority.issue("server")
    args = {
        "model": {"path": str(tiny_checkpoints("llama")), "served_name": "m"},
        "api": {"batch_dir": str(tmp_path / "batches")},
    }
    file = tmp_path / "serve.yaml"
    http: dict[str, object] = {**first.http_options, "root_path": "/outer"}
    file.write_text(yaml.safe_dump(config_of_args(args, http)))
    port = free_port()
    url = f"https://127.0.0.1:{port}"

    with serving(file, proxy, port) as (process, output):
        assert f"{url}/v1 (OpenAI)" in until_printed(output, "ready in")
        with httpx.Client(base_url=url, verify=authority.context(), timeout=60) as client:
            body = {"model": "m", "prompt": "a", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
            message = {
                "model": "m",
                "max_tokens": 2,
                "messages": [{"role": "user", "content": "a"}],
            }
            batch = {"requests": [{"custom_id": "x", "params": message}]}
            made = client.post("/v1/messages/batches", json=batch).json()
            deadline = time.monotonic() + 60
            while made["processing_status"] != "ended":
                assert time.monotonic() < deadline, made
                time.sleep(0.1)
                made = client.get(f"/v1/messages/batches/{made['id']}").json()
            assert made["results_url"].startswith(f"{url}/outer/")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health")
        if proxy == "haproxy":
            second = authority.issue("server")
            until_printed(output, "HTTPS uses the new files of")
            assert serial_at(port, authority.context()) == second.serial != first.serial
    assert process.returncode == 0, output.read_text()
    assert still_running(process.pid) == []
