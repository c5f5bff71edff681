"""Draining of a replica that Serve stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import httpx
import pytest

from remora.deployments.draining import drain
from remora.deployments.http.core.auth import Access
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.ray_private import shutdown_check
from tests.deployments.fakes import FakeEngine, FakeServer, client_of, make_config
from tests.deployments.http.shared_app import share_http_app


@dataclass
class DrainedEngine(FakeEngine):
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    async def drain(self, timeout_s: float) -> bool:
        self.drained.set()
        return False


@dataclass
class Replica:
    server: ServerState
    engine: DrainedEngine
    client: httpx.AsyncClient
    is_stopping: bool = False


@pytest.fixture
async def replica() -> AsyncGenerator[Replica, None]:
    engine = DrainedEngine()
    server = ServerState.over(FakeServer(client=engine, config=make_config(drain_timeout_s=0.5)))
    app = share_http_app(server, access=lambda: Access(is_local=True))
    async with client_of(app) as client:
        yield Replica(server, engine, client)


async def test_a_draining_replica_is_alive_but_not_ready(replica: Replica) -> None:
    task = asyncio.create_task(drain(replica.server, None, lambda: replica.is_stopping))
    before = await replica.client.get("/ready")

    replica.is_stopping = True
    await replica.engine.drained.wait()
    await task

    ready, health = await replica.client.get("/ready"), await replica.client.get("/health")
    assert (before.status_code, ready.status_code, health.status_code) == (200, 503, 200)
    assert ready.headers["x-should-retry"] == "true"


async def test_late_requests_are_served_and_long_ones_ended_in_time(
    replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    replica.is_stopping = True
    task = asyncio.create_task(drain(replica.server, None, lambda: replica.is_stopping))
    while not replica.server.calls.is_draining:
        await asyncio.sleep(0)

    late = await replica.client.post("/v1/completions", json={"prompt": "a"})
    was_waiting = not replica.engine.drained.is_set()
    await task

    assert late.status_code == 200
    assert was_waiting
    assert "drain_timeout_s" in caplog.text


async def test_batches_are_left_to_other_replicas(replica: Replica) -> None:
    batches = asyncio.create_task(asyncio.sleep(600))
    replica.is_stopping = True

    await drain(replica.server, batches, lambda: replica.is_stopping)

    assert batches.cancelled()


def test_outside_serve_there_is_no_shutdown_check() -> None:
    assert shutdown_check() is None
