"""`remora serve --proxy haproxy`: answers, streams, refusals, departures and deaths through it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from remora.deployments.free_ports import free_port
from tests.conftest import TinyCheckpoints
from tests.deployments.cli.haproxy.needs import HAPROXY
from tests.deployments.cli.test_serve_process import still_running, until_ready

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    HAPROXY,
]
LONG = {"prompt": "a", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(tiny_checkpoints: TinyCheckpoints) -> Iterator[tuple[subprocess.Popen[str], str]]:
    port = free_port()
    command = [str(Path(sys.executable).with_name("remora")), "serve", "--proxy", "haproxy"]
    process = subprocess.Popen(
        [*command, str(tiny_checkpoints("llama")), "--port", str(port), "--model-name", "m"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    until_ready(process, url)
    until_direct(url)
    yield process, url
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=90)


@pytest.fixture
def client(server: tuple[subprocess.Popen[str], str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[1], timeout=60) as client:
        yield client


def until_direct(url: str) -> None:
    """Wait until HAProxy knows the replica; Serve's Python proxy answers in its place before."""
    deadline = time.monotonic() + 30
    streak = 0
    while streak < 3:
        assert time.monotonic() < deadline, "the replica was not reached"
        streak = streak + 1 if httpx.get(f"{url}/health", timeout=5).is_success else 0
        time.sleep(0.5)


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"remora_{name}{{"))


def until(client: httpx.Client, name: str, value: float) -> None:
    deadline = time.monotonic() + 20
    while metric(client, name) != value:
        assert time.monotonic() < deadline, f"{name} did not become {value}"
        time.sleep(0.05)


def texts(response: httpx.Response) -> str:
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
    chunks: list[Any] = [json.loads(line.removeprefix("data: ")) for line in lines]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_a_chat_and_its_stream_say_the_same(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    whole = client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
    stream = client.post("/v1/chat/completions", json=body | {"stream": True})

    assert whole.headers.get_list("x-request-id") == ["mine"]
    assert len(stream.headers.get_list("x-request-id")) == 1
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.text.endswith("data: [DONE]\n\n")
    assert texts(stream) == whole.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/completions", {"prompt": "a", "top_p": 7}, 400, "invalid_request_error"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "not_found_error"),
        ("/nowhere", {}, 404, "not_found_error"),
    ],
)
def test_refusals_keep_their_shape(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, kind: str
) -> None:
    response = client.post(path, json=body)

    assert response.status_code == status
    assert response.json()["error"]["type"] == kind


def test_headers_too_large_are_refused_by_the_replica(client: httpx.Client) -> None:
    response = client.get("/health", headers={f"x-{n}": "y" * 1000 for n in range(36)})

    assert response.status_code == 431
    assert response.json()["error"]["code"] == "headers_too_large"


def test_a_client_that_leaves_its_stream_ends_the_request(client: httpx.Client) -> None:
    aborted = metric(client, "aborted_total")
    with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        next(response.iter_bytes())

    until(client, "aborted_total", aborted + 1)
    until(client, "num_running", 0)


def test_a_client_that_leaves_ends_its_whole_answer(client: httpx.Client) -> None:
    aborted = metric(client, "aborted_total")
    body = json.dumps(LONG).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    for _ in range(4):
        with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as own:
            own.sendall(head + b"content-length: %d\r\n\r\n" % len(body))
            time.sleep(0.05)  # HAProxy forwards the head before the body has come
            own.sendall(body)
            until(client, "num_running", 1)

    until(client, "aborted_total", aborted + 4)
    until(client, "num_running", 0)


def test_a_replica_that_dies_is_told_in_our_shape_and_replaced(
    server: tuple[subprocess.Popen[str], str], client: httpx.Client
) -> None:
    process, _ = server
    (replica,) = [
        child.pid
        for child in psutil.Process(process.pid).children(recursive=True)
        if "ray::ServeReplica" in " ".join(child.cmdline())
    ]
    os.kill(replica, signal.SIGKILL)
    deadline = time.monotonic() + 60
    answers: list[httpx.Response] = []
    while not (answers and answers[-1].is_success):
        assert time.monotonic() < deadline, answers
        try:
            body = {"prompt": "a", "max_tokens": 2}
            answers.append(client.post("/v1/completions", json=body))
        except httpx.RemoteProtocolError:  # closed unanswered, as a connection kept alive may be
            pass
        time.sleep(0.1)

    kinds = {answer.json()["error"]["type"] for answer in answers if not answer.is_success}
    assert kinds <= {"overloaded_error", "server_error"}


def test_a_signal_stops_it_and_nothing_stays_behind(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = server
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=90)

    assert process.returncode == 0, output
    assert "HAProxy serves read-only counters" in output
    assert still_running(process.pid) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
