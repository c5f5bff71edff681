"""What the keys of the queue, the loop and the seeds do to an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from remora.configs.errors import QueueFull, RateLimited, StepTimeout
from remora.configs.load import parse_args
from remora.configs.planning.device_plan import plan_device
from remora.engine.client import LocalEngineClient
from remora.engine.launch import _make_engine
from remora.engine.tenants import EVERYONE, Tenant
from remora.engine.types import Output, Request, SamplingParams, StepPlan
from tests.engine.configured import MODEL, configured, plan_for
from tests.engine.fakes import FakeRunner, make_engine, make_plan
from tests.engine.scheduler.scheduled import make_request as make_short
from tests.engine.test_loop import StuckRunner

WAIT_S = 20


@asynccontextmanager
async def client_for(runner: FakeRunner | None = None, **keys: Any) -> AsyncIterator[Any]:
    plan = plan_for(max_running_requests=1, max_position=4096, **({"kv_tokens": 8192} | keys))
    client = LocalEngineClient(make_engine(plan, runner), None)
    try:
        yield client
    finally:
        client.close()


def make_request(name: str, num_tokens: int, tenant: Tenant = EVERYONE) -> Request:
    sampling = SamplingParams(max_tokens=3000, temperature=0.0)
    ids = [1] * num_tokens
    return Request(request_id=name, prompt_ids=ids, sampling=sampling, tenant=tenant)


class Queue:
    """Requests of which the first runs and the others wait."""

    def __init__(self, client: LocalEngineClient) -> None:
        self._client = client
        self._streams: list[AsyncGenerator[Output, None]] = []
        self._firsts: list[asyncio.Future[Output]] = []

    async def enter(
        self, name: str, num_tokens: int, tenant: Tenant = EVERYONE
    ) -> asyncio.Future[Output]:
        stream = self._client.generate(make_request(name, num_tokens, tenant))
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


@asynccontextmanager
async def queue_for(**keys: Any) -> AsyncIterator[tuple[Any, Queue]]:
    """Make a client and its queue, of which one request runs already."""
    async with client_for(**keys) as client:
        queue = Queue(client)
        await (await queue.enter("running", 4))
        yield client, queue
        await queue.leave()


@pytest.mark.observes("engine.max_queued_requests")
@pytest.mark.parametrize("most", [0, 2])
async def test_no_more_requests_wait_than_may(most: int) -> None:
    async with queue_for(max_queued_requests=most) as (_, queue):
        waiting = [await queue.enter(f"w{number}", 4) for number in range(most)]
        beyond = await queue.enter("beyond", 4)

        assert not any(first.done() for first in waiting)
        with pytest.raises(QueueFull, match=f"the limit is {1 + most}"):
            beyond.result()


@pytest.mark.observes("engine.max_queued_tokens")
async def test_no_more_tokens_wait_than_may() -> None:
    async with queue_for(max_queued_tokens=24) as (_, queue):
        await queue.enter("half", 20)
        fits = await queue.enter("fits", 4)
        beyond = await queue.enter("beyond", 1)

        assert not fits.done()
        with pytest.raises(QueueFull, match="24 tokens are queued; with 1 more") as caught:
            beyond.result()
        assert caught.value.limit == "max_queued_tokens"
        assert caught.value.retry_after_s >= 1


async def test_a_single_prompt_of_any_length_may_wait() -> None:
    async with queue_for(max_queued_tokens=24) as (client, queue):
        waiting = await queue.enter("waiting", 240)

        assert not waiting.done()
        names = ("waiting", "running", "unknown")
        assert [await client.is_waiting(name) for name in names] == [True, False, False]


@pytest.mark.parametrize("keys", [{"max_queued_requests": 2}, {"max_queued_tokens": 8}])
async def test_each_tenant_has_a_queue_of_its_own(keys: dict[str, int]) -> None:
    heavy, light = Tenant(name="heavy"), Tenant(name="light", max_open=1)
    async with queue_for(**keys) as (_, queue):
        entered = [await queue.enter(f"h{number}", 4, heavy) for number in range(4)]
        fits = await queue.enter("l0", 4, light)
        beyond = await queue.enter("l1", 4, light)

        assert not fits.done()
        with pytest.raises(QueueFull):
            entered[-1].result()
        with pytest.raises(RateLimited, match="the limit is 1") as caught:
            beyond.result()
        assert caught.value.limit == "max_open_requests"


@pytest.mark.observes("engine.step_timeout_s")
async def test_a_step_that_takes_longer_than_it_may_ends_the_engine() -> None:
    runner = StuckRunner()
    async with client_for(runner, step_timeout_s=0.1) as client:
        stream = client.generate(make_request("r", 4))
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(StepTimeout, match=r"step_timeout_s\) is 0\.1 s"):
                await anext(stream)
        runner.release.set()


@pytest.mark.observes("engine.random_seed")
def test_seeds_of_requests_without_one_follow_from_the_engines() -> None:
    def seeds(random_seed: int) -> list[int]:
        harness = configured(random_seed=random_seed)
        for name in "ab":
            harness.engine.add(make_short(name, [1], 1))
        harness.run()
        return [init.seed for plan in harness.runner.plans for init in plan.added]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 4


class OverlapNoter(FakeRunner):
    """Notes whether a step began before the one before had finished."""

    overlapped = False

    def begin(self, plan: StepPlan) -> None:
        self.overlapped |= bool(self.work)
        super().begin(plan)

    def possible_drafts(self, drafts: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        return [len(draft_ids) for _, draft_ids in drafts]


class FewTokens:
    """As much of a tokenizer as an engine asks."""

    eos_token_ids = (0,)
    takes_text = True


@pytest.mark.observes("engine.overlap")
@pytest.mark.parametrize(("keys", "overlaps"), [({}, True), ({"overlap": False}, False)])
def test_steps_overlap_or_run_one_after_the_other(keys: dict[str, bool], overlaps: bool) -> None:
    config = parse_args({"model": {"path": "x"}, "engine": keys})
    how = plan_device(config, "cuda", has_triton=True, max_running=4, has_adapters=False)
    plan = make_plan(on_device=how)
    runner = OverlapNoter(plan.page_size)
    engine = _make_engine(plan, MODEL, FewTokens(), runner)  # type: ignore[arg-type]
    engine.add(make_short("r", [1, 2], 4))
    while engine.has_work:
        engine.step()

    assert runner.overlapped == overlaps


async def test_an_idle_engine_takes_no_processor_time_and_wakes() -> None:
    async with client_for() as client:
        await asyncio.sleep(0.05)
        before = time.process_time()
        await asyncio.sleep(0.5)
        asleep_s = time.process_time() - before
        stream = client.generate(make_request("r", 4))
        async with asyncio.timeout(WAIT_S):
            await anext(stream)
        await stream.aclose()

    assert asleep_s < 0.2
