"""`remora serve --local` as a user runs it: one process, without Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

from remora.deployments.free_ports import free_port
from tests.conftest import TinyCheckpoints
from tests.lora.peft_files import PREFIX, RANK, write_adapter

# The command, which says at its end whether it has imported Ray.
PROGRAM = """
import atexit, sys
atexit.register(lambda: print("imported ray:", "ray" in sys.modules, flush=True))
from remora.deployments.cli.entry import main
main()
"""
START_TIMEOUT_S = 60.0


@dataclass
class Started:
    process: subprocess.Popen[str]
    url: str
    output: Path

    def printed(self) -> str:
        return self.output.read_text()

    def until_printed(self, text: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while text not in self.printed():
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.02)


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[Started]:
    port = free_port()
    output = folder / "output.txt"
    with output.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "serve", *arguments, "--local", "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"REMORA_ENGINE__NUM_THREADS": "1"},
        )
    try:
        yield Started(process, f"http://127.0.0.1:{port}", output)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def long_model(tiny_checkpoints: TinyCheckpoints) -> str:
    """A model whose answers can last for seconds."""
    return str(tiny_checkpoints("llama", max_position_embeddings=65_536))


def adapters_of(path: str, folder: Path) -> list[str]:
    """Return the options of two adapters of a model."""
    config = json.loads((Path(path) / "config.json").read_text())
    outputs, inputs = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    written = []
    for name in ("a", "b"):
        tensors = {
            f"{PREFIX}q_proj.lora_A.weight": torch.ones(RANK, inputs),
            f"{PREFIX}q_proj.lora_B.weight": torch.ones(outputs, RANK),
        }
        place = write_adapter(folder / name, tensors=tensors)
        written.append({"name": name, "path": str(place)})
    return ["--set", f"lora.adapters={json.dumps(written)}"]


def body(num_tokens: int, **fields: object) -> dict[str, object]:
    return {
        "model": "m",
        "prompt": "a",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }


def test_it_answers_without_ray_and_a_signal_lets_open_requests_finish(
    long_model: str, tmp_path: Path
) -> None:
    adapters = adapters_of(long_model, tmp_path)
    with started(tmp_path, long_model, "--model-name", "m", *adapters) as server:
        server.until_printed("ready in")
        url = f"{server.url}/v1/completions"
        answer = httpx.post(url, json=body(4), timeout=60)
        adapted = httpx.post(url, json=body(4, model="a"), timeout=60)
        with httpx.stream("POST", url, json=body(4000, stream=True), timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.until_printed("stopping")
            rest = list(lines)
        code = server.process.wait(30)
        output = server.printed()

    assert answer.json()["usage"]["completion_tokens"] == 4
    assert answer.headers["x-request-id"]
    assert adapted.json()["model"] == "a"
    assert "data: [DONE]" in rest
    assert code == 0
    assert output.count("remora ") == 1  # the banner
    assert "\x1b" not in output
    assert "Traceback" not in output
    assert output.endswith("imported ray: False\n")


def test_a_stream_past_the_drain_timeout_ends_with_an_error(
    long_model: str, tmp_path: Path
) -> None:
    drain = ("--set", "api.drain_timeout_s=0.5")
    with started(tmp_path, long_model, "--model-name", "m", *drain) as server:
        server.until_printed("ready in")
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body(60_000, stream=True), timeout=60
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        code = server.process.wait(30)

    assert any("server stopped" in line for line in rest)
    assert code == 0


def test_a_taken_port_is_one_line_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "serve", "--local", "--port", str(port)],
            capture_output=True,
            text=True,
            check=False,
        )

    assert done.returncode == 2
    assert done.stderr == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another with "
        "--port\n"
    )


@pytest.mark.parametrize("damage", ["no config", "no weights"])
def test_a_damaged_model_is_one_line(damage: str, tmp_path: Path) -> None:
    if damage == "no weights":
        (tmp_path / "config.json").write_text("{}")
    with started(tmp_path, str(tmp_path)) as server:
        assert server.process.wait(60) == 2
        *_, line, _ray = server.printed().splitlines()

    assert line.startswith("error: ")
    assert "config.json" in line
