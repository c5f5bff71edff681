"""Running a peer's server in the foreground and saying when it answers."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx
from rich.console import Console

from tests.benchmarks.peers.groups import stop_group
from tests.benchmarks.peers.peers import (
    Peer,
    PeerError,
    environment,
    served_name,
    server_command,
)

READY_WITHIN_S = 600.0

console = Console(stderr=True)


def serve(peer: Peer, model: Path, *, port: int, threads: int) -> None:
    """Serve until stopped by Ctrl-C or SIGTERM. Raises PeerError."""
    started = time.perf_counter()
    # A group of its own, so that no process of the server's outlives it.
    server = subprocess.Popen(
        server_command(peer, model, port=port, threads=threads),
        env=environment(peer, threads),
        start_new_session=True,
    )
    try:
        name = served_name(peer, model)
        _wait_until_ready(server, port)
        _ask(port, name)
        seconds = time.perf_counter() - started
        url = f"http://127.0.0.1:{port}/v1"
        ready = f"{peer.name} is ready after {seconds:.1f} s: --url {url} --model {name}"
        console.print(ready, soft_wrap=True)
        if server.wait() != 0:
            raise PeerError(f"the server of {peer.name} ended with {server.returncode}")
    except KeyboardInterrupt:
        console.print(f"stopping {peer.name}")
    finally:
        stop_group(server)


def _wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise PeerError(f"the server ended with {server.returncode}; its reason is above")
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise PeerError(f"no answer from port {port} within {READY_WITHIN_S:.0f} s")


def _ask(port: int, name: str) -> None:
    """Have a first answer: transformers loads the model only then."""
    body = {"model": name, "prompt": "One, two, three", "max_tokens": 4}
    answer = httpx.post(
        f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=READY_WITHIN_S
    )
    if answer.status_code != 200:
        raise PeerError(f"the first request was refused ({answer.status_code}): {answer.text}")
