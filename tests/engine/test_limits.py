"""Limits of the queue in front of the engine: how many tokens wait, and which requests do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from remora.configs.errors import QueueFull
from remora.engine.client import LocalEngineClient
from remora.engine.engine import Engine
from remora.engine.types import Output, Request, SamplingParams
from tests.engine.fakes import VOCAB, FakeRunner, make_plan

MAX_QUEUED_TOKENS = 24


def make_request(name: str, num_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=3000, temperature=0.0)
    return Request(request_id=name, prompt_ids=[1] * num_tokens, sampling=sampling)


@pytest.fixture
async def client() -> AsyncIterator[LocalEngineClient]:
    plan = make_plan(
        max_model_len=4096,
        num_pages=1200,
        max_running_requests=1,
        max_queued_requests=100,
        max_queued_tokens=MAX_QUEUED_TOKENS,
    )
    engine = Engine(plan, FakeRunner(page_size=4), eos_token_ids=[0], vocab_size=VOCAB)
    client = LocalEngineClient(engine, None)
    yield client
    client.close()


class Queue:
    """Requests of which the first runs and the others wait."""

    def __init__(self, client: LocalEngineClient) -> None:
        self._client = client
        self._streams: list[AsyncGenerator[Output, None]] = []
        self._firsts: list[asyncio.Future[Output]] = []

    async def enter(self, name: str, num_tokens: int) -> asyncio.Future[Output]:
        stream = self._client.generate(make_request(name, num_tokens))
        first = asyncio.ensure_future(anext(stream))
        self._streams.append(stream)
        self._firsts.append(first)
        await asyncio.sleep(0)
        return first

    async def leave(self) -> None:
        await self._client.abort(None)
        await asyncio.gather(*self._firsts, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()


async def test_prompts_wait_up_to_the_limit_of_tokens(client: LocalEngineClient) -> None:
    queue = Queue(client)
    await (await queue.enter("running", 4))

    await queue.enter("half", MAX_QUEUED_TOKENS - 4)
    fits = await queue.enter("fits", 4)
    beyond = await queue.enter("beyond", 1)

    assert beyond.done()
    assert not fits.done()
    with pytest.raises(QueueFull, match="24 tokens are queued; with 1 more") as told:
        beyond.result()
    assert told.value.limit == "max_queued_tokens"
    assert told.value.retry_after_s >= 1
    await queue.leave()


async def test_a_single_prompt_of_any_length_may_wait(client: LocalEngineClient) -> None:
    queue = Queue(client)
    await (await queue.enter("running", 4))
    waiting = await queue.enter("waiting", 10 * MAX_QUEUED_TOKENS)

    assert not waiting.done()
    assert await client.is_waiting("waiting")
    assert not await client.is_waiting("running")
    assert not await client.is_waiting("unknown")
    await queue.leave()
