"""Shutdown of a gateway: open requests receive an error in time."""

from __future__ import annotations

import asyncio

import pytest

from tests.deployments.fakes import FakeEngine, FakeServer
from tests.deployments.gateway.fakes import Replica, Replicas, begin, gateway, ready


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remora.deployments.gateway.shutdown.POLL_S", 0.01)


async def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    server = FakeServer(client=FakeEngine(text="Paris.", gate=asyncio.Event()))
    stopping: list[bool] = []
    replica = Replica("one", server)
    async with gateway(ready(replica), is_stopping=lambda: bool(stopping)) as client:
        asking = await begin(client, replica, stream=True)
        await asyncio.sleep(0.1)  # the first token is on its way
        stopping.append(True)
        answer = await asking
        async with asyncio.timeout(5):
            await server.client.gone.wait()

    assert '"text":"P"' in answer.text
    assert '"code":"unavailable"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_a_request_that_is_held_is_refused() -> None:
    async with gateway(Replicas([Replica("one")]), is_stopping=lambda: True) as client:
        answer = await client.post("/v1/messages", json={})

    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert answer.headers["x-should-retry"] == "true"


async def test_what_comes_until_then_is_answered() -> None:
    async with gateway(ready(Replica("one")), is_stopping=lambda: True, drain_s=9.0) as client:
        not_ready = await client.get("/ready")
        answer = await client.post("/v1/completions", json={"prompt": "x"})

    assert (not_ready.status_code, answer.status_code) == (503, 200)
