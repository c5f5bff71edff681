"""The engine's client with adapters that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import pytest

from remora.configs.errors import QueueFull
from remora.deployments.adapters.client import AdaptingClient
from remora.engine.protocols import EngineClient
from remora.engine.types import FinishReason, Output, Request, SamplingParams
from remora.lora.adapter_cache import AdapterCache
from tests.deployments.fakes import FakeEngine, make_plan
from tests.lora.fake_loader import FakeLoader, record, wanted
from tests.moments import cancelled, nothing_left, steps


class Engine:
    """Says which instance a request runs with, when it is let."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.aborted: list[str | None] = []

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        await self.gate.wait()
        yield Output(
            index=0, token_ids=(request.lora_id,), text="", finish_reason=FinishReason.LENGTH
        )

    async def abort(self, request_id: str | None) -> int:
        self.aborted.append(request_id)
        return 0

    async def is_waiting(self, request_id: str) -> bool:
        return False


class Parts:
    def __init__(self, engine: Any = None, **plan: Any) -> None:
        self.engine: Any = engine or Engine()
        self.loader = FakeLoader(gate=asyncio.Event())
        self.adapter_cache = AdapterCache(self.loader, max_loaded=4)
        self.adapter_cache.adopt(wanted(record(7)))
        self.client = AdaptingClient(
            cast("EngineClient", self.engine), self.adapter_cache, make_plan(**plan)
        )

    def start(self, name: str, **options: int) -> asyncio.Task[list[Output]]:
        return asyncio.create_task(self.read(name, **options))

    async def read(
        self, name: str, *, adapter: int = 7, n: int = 1, max_tokens: int = 1
    ) -> list[Output]:
        request = Request(
            request_id=name,
            prompt_ids=[1],
            sampling=SamplingParams(max_tokens=max_tokens, n=n),
            lora_id=adapter,
        )
        async with aclosing(self.client.generate(request)) as outputs:
            return [output async for output in outputs]

    def load(self) -> None:
        assert self.loader.gate is not None
        self.loader.gate.set()


async def test_a_request_waits_for_its_adapter_and_holds_it() -> None:
    parts = Parts()
    running = parts.start("a")
    await steps(50)
    assert await parts.client.is_waiting("a")
    parts.load()
    await steps(50)
    assert not await parts.client.is_waiting("a")
    (report,) = parts.adapter_cache.reports()
    assert report.num_users == 1
    parts.engine.gate.set()
    assert [output.token_ids for output in await running] == [(7,)]
    assert parts.adapter_cache.reports()[0].num_users == 0


async def test_requests_for_the_base_do_not_wait() -> None:
    parts = Parts()
    parts.engine.gate.set()
    assert [output.token_ids for output in await parts.start("a", adapter=0)] == [(0,)]


async def test_a_waiting_request_can_be_aborted() -> None:
    parts = Parts()
    running, other = parts.start("a", n=2), parts.start("b")
    await steps(50)
    assert await parts.client.abort("a") == 1
    assert [(o.index, o.finish_reason) for o in await running] == [
        (0, FinishReason.ABORT),
        (1, FinishReason.ABORT),
    ]
    parts.load()
    parts.engine.gate.set()
    assert len(await other) == 1
    assert parts.adapter_cache.reports()[0].num_users == 0


@pytest.mark.parametrize("is_loaded", [False, True])
async def test_a_client_that_leaves_lets_go(is_loaded: bool) -> None:
    parts = Parts()
    if is_loaded:
        parts.load()
    running = parts.start("a")
    await steps(50)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert parts.adapter_cache.reports()[0].num_users == 0


async def test_no_more_wait_than_the_queue_takes() -> None:
    parts = Parts(max_running_requests=1, max_queued_requests=1)
    waiting = [parts.start(str(number)) for number in range(2)]
    await steps(50)
    with pytest.raises(QueueFull, match="wait for their adapters"):
        await parts.start("more")
    parts.load()
    parts.engine.gate.set()
    assert len(await asyncio.gather(*waiting)) == 2


async def test_ending_a_version_aborts_what_runs_with_it() -> None:
    parts = Parts()
    parts.load()
    running = parts.start("a")
    await steps(50)
    await parts.client.end(7)
    assert parts.engine.aborted == ["a"]
    parts.engine.gate.set()
    await running


@pytest.mark.parametrize("again", [False, True])
async def test_a_request_that_is_cancelled_at_any_moment_holds_nothing(again: bool) -> None:
    async with nothing_left():
        for moment in range(20):
            parts = Parts(FakeEngine(gate=asyncio.Event()))
            parts.load()
            await cancelled(parts.read("a"), moment, again=again)
            assert parts.engine.running == set()
            assert parts.adapter_cache.stats["used"] == 0
            assert not await parts.client.is_waiting("a")
            parts.adapter_cache.adopt(wanted(revision=2))
            await parts.adapter_cache.settled()
            assert parts.loader.loaded == set()


async def test_an_abort_counts_at_any_moment() -> None:
    for moment in range(1, 12):
        parts = Parts(FakeEngine(gate=asyncio.Event()))
        parts.load()
        running = parts.start("a", max_tokens=2)
        await steps(moment)
        assert await parts.client.abort("a") == 1
        parts.engine.gate.set()
        assert (await running)[-1].finish_reason is FinishReason.ABORT, moment
        assert parts.adapter_cache.stats["used"] == 0
