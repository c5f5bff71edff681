"""A server started for a measurement and stopped after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from remora.deployments.bench.server_process import own_command, running_server
from remora.deployments.bench.targets import read_target
from remora.deployments.cli.terminal import Failure
from tests.conftest import TinyCheckpoints

pytestmark = pytest.mark.ray


def still_running(word: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if word in command:
            found.append(command)
    return found


def test_a_configuration_is_served_measured_and_stopped(tiny_checkpoints: TinyCheckpoints) -> None:
    sizes = ["--requests", "4", "--input", "16", "--output", "8", "--concurrency", "2"]
    settings = ["--set", "engine.num_threads=1", "--set", "engine.kv_tokens=2048"]

    done = subprocess.run(
        own_command(
            "bench", "serve", str(tiny_checkpoints("llama")), *settings, *sizes, "--json", "-"
        ),
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]["online-2"]
    assert figures["failures"] == 0
    assert figures["bound_share"] > 0
    assert figures["peak_rss_sum_mib"] > figures["peak_rss_mib"] > 1
    assert still_running("remora-bench-") == []


def test_a_server_that_cannot_start_says_why() -> None:
    target = read_target("smollm2-135m-instruct")
    target.raw["nonsense"] = 1

    with pytest.raises(Failure, match="nonsense"), running_server(target):
        pass


@pytest.mark.slow
def test_an_interrupt_stops_the_server_too(tiny_checkpoints: TinyCheckpoints) -> None:
    process = subprocess.Popen(
        own_command("bench", "serve", str(tiny_checkpoints("llama")), "--requests", "1000000"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Background jobs inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not still_running("remora-bench-") and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)

    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert still_running("remora-bench-") == []
