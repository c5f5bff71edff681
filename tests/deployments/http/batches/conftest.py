"""A server of batches and its client."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from remora.deployments.http.batches import runner as batches_runner
from tests.deployments.fakes import FakeServer
from tests.deployments.http.batches.jobs import Client, make_server, opened


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_runner, "TICK_S", 0.001)
    monkeypatch.setattr(batches_runner, "SAVE_S", 0.0)


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    return make_server(tmp_path)


@pytest.fixture
async def client(server: FakeServer) -> AsyncGenerator[Client, None]:
    async with opened(server) as client:
        yield client
