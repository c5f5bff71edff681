"""`remora serve` ends with each process that it cannot go on without, and leaves nothing.

All servers listen on the same port, one after another.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.conftest import TinyCheckpoints
from tests.deployments.lifecycle.leftovers import belongings, until_gone
from tests.deployments.lifecycle.server import REPLICA, Server, make_serve_config, running

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]
END_S = 10.0


@pytest.fixture(scope="module")
def config(tiny_checkpoints: TinyCheckpoints) -> dict[str, Any]:
    return make_serve_config(tiny_checkpoints("llama"))


def front(server: Server) -> int:
    return server.process.pid


def program(part: str) -> Callable[[Server], int]:
    """Return what finds the process of a server whose command line contains `part`."""

    def find(server: Server) -> int:
        family = psutil.Process(server.process.pid).children(recursive=True)
        return next(int(p.pid) for p in family if part in " ".join(p.cmdline()))

    return find


@pytest.mark.parametrize(
    ("victim", "code", "reason"),
    [
        (front, -signal.SIGKILL, "the front process of the server was killed"),
        (program("gcs/gcs_server"), 1, "Ray's GCS ended"),
        (program("ray::RuntimeEnvAgent"), 1, "Ray's raylet ended"),
    ],
    ids=["front", "GCS", "agent"],
)
def test_nothing_survives_a_server_that_has_lost_a_process(
    config: dict[str, Any],
    tmp_path: Path,
    victim: Callable[[Server], int],
    code: int,
    reason: str,
) -> None:
    with running(config, tmp_path, proxy="haproxy") as server:
        # Other ports may be taken by another Ray, which has the same defaults.
        port = frozenset({config["http_options"]["port"]})
        found = replace(belongings([server.process.pid]), ports=port)
        folder = Path(psutil.Process(server.pids(REPLICA)[0]).environ()["TMPDIR"])
        assert folder.is_dir()

        os.kill(victim(server), signal.SIGKILL)

        began = time.monotonic()
        assert server.process.wait(END_S) == code
        assert until_gone(found.left, END_S) == []
        assert time.monotonic() - began < END_S
        assert reason in server.says().splitlines()[-1]
        # What it forwards from processes that are being killed is not its own.
        assert "Traceback" not in server.says_itself()
        assert not folder.exists()
