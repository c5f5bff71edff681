"""The limit of concurrent requests: a request above it is refused, or waits in order."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.deployments.http.core.concurrency import ConcurrencyLimiter
from remora.deployments.http.generation.server_state import ServerState
from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_config
from tests.deployments.http.refusals import refusals_of
from tests.moments import end, nothing_left, steps

BODY = {"prompt": "a", "max_tokens": 2}


def busy_server(**api: Any) -> tuple[FakeServer, asyncio.Event]:
    """Return a server whose requests end once the event is set."""
    gate = asyncio.Event()
    config = make_config(max_concurrent_requests=2, **api)
    return FakeServer(client=FakeEngine(gate=gate), config=config), gate


async def ask(client: httpx.AsyncClient) -> asyncio.Task[httpx.Response]:
    """Send a request; return once it runs, waits or is refused."""
    task = asyncio.create_task(client.post("/v1/completions", json=BODY))
    for _ in range(50):
        await asyncio.sleep(0)
    return task


@pytest.mark.observes("api.max_concurrent_requests")
async def test_one_request_more_than_may_run_is_refused() -> None:
    server, gate = busy_server()
    async with make_client(server) as client:
        running = [await ask(client), await ask(client)]
        refused = await (await ask(client))
        assert (await client.get("/health_generate")).status_code == 200  # not counted
        gate.set()
        taken = [(await task).status_code for task in running]
        later = await client.post("/v1/completions", json=BODY)

        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert await refusals_of(client) == ["max_concurrent_requests"]
    assert taken == [200, 200]
    assert later.status_code == 200


@pytest.mark.observes("api.wait_when_busy")
async def test_one_request_more_than_may_run_waits() -> None:
    server, gate = busy_server(wait_when_busy=True)
    async with make_client(server) as client:
        tasks = [await ask(client) for _ in range(4)]
        num_running = len(server.client.running)
        gate.set()
        answers = await asyncio.gather(*tasks)

    assert num_running == 2
    assert [answer.status_code for answer in answers] == [200] * 4


async def test_a_place_that_comes_too_late_goes_to_the_next() -> None:
    places = ConcurrencyLimiter()
    entered: list[str] = []

    async def hold(name: str, wait_s: float = 10.0) -> None:
        async with places.taken(1, wait_s=wait_s):
            entered.append(name)

    async with places.taken(1, wait_s=None):
        gone = asyncio.create_task(hold("gone"))
        stays = asyncio.create_task(hold("stays"))
        await asyncio.sleep(0)
    gone.cancel()  # it is next, but has not entered yet
    await stays

    assert entered == ["stays"]
    async with places.taken(1, wait_s=None):
        pass


def test_waiting_needs_a_limit() -> None:
    with pytest.raises(ConfigError, match=r"api\.wait_when_busy"):
        parse_args({"model": {"path": "x"}, "api": {"wait_when_busy": True}})


async def test_the_limit_may_change_while_calls_run() -> None:
    server, gate = busy_server()
    state = ServerState.over(server)
    gate.set()

    state.adopt(make_config(max_concurrent_requests=5))

    assert state.calls.limits.max_requests == 5


@pytest.mark.parametrize("again", [False, True])
async def test_a_call_that_is_cancelled_at_any_moment_has_no_place(again: bool) -> None:
    async def hold(num_steps: int) -> None:
        async with places.taken(1, wait_s=10.0):
            await steps(num_steps)

    async with nothing_left():
        for moment in range(12):
            for first_steps in range(6):
                places = ConcurrencyLimiter()
                first = asyncio.create_task(hold(first_steps))
                await steps(1)
                going, last = asyncio.create_task(hold(2)), asyncio.create_task(hold(2))
                await steps(moment)
                going.cancel()
                await end(going, again=again)
                await first
                await last
                async with places.taken(1, wait_s=None):
                    pass
