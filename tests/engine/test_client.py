"""The asyncio side of the engine: streams, aborts, refusals, failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from remora.configs.errors import EngineError, InvalidRequest, NotFinite, QueueFull, Unavailable
from remora.engine.client import LocalEngineClient
from remora.engine.engine import Engine
from remora.engine.kv.hashes import page_hashes
from remora.engine.types import (
    NOT_FINITE,
    FinishReason,
    Namespace,
    Output,
    Request,
    RowFault,
    SamplingParams,
    StepPlan,
)
from tests.engine.fakes import (
    FakeRunner,
    MakeClient,
    expected_output,
    make_engine,
    make_plan,
)
from tests.moments import cancelled, nothing_left


def make_request(name: str = "r", *, max_tokens: int = 6, n: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, n=n)
    return Request(request_id=name, prompt_ids=[1, 2, 3], sampling=sampling)


@pytest.fixture
async def client(runner: FakeRunner, make_client: MakeClient) -> LocalEngineClient:
    return make_client(runner, max_model_len=4096, num_pages=1200, max_queued_requests=2)


async def collect(client: LocalEngineClient, request: Request) -> list[Output]:
    async with aclosing(client.generate(request)) as outputs:
        return [output async for output in outputs]


async def begin(client: LocalEngineClient, name: str = "r") -> AsyncGenerator[Output, None]:
    """Start a request of 4,000 tokens; returns its stream after the first output."""
    stream = client.generate(make_request(name, max_tokens=4000))
    await anext(stream)
    return stream


async def settle(client: LocalEngineClient) -> None:
    """Wait until the engine has taken in what it was told."""
    while client.stats().num_running or client.stats().num_waiting:
        await asyncio.sleep(0.005)


async def test_each_of_n_streams_ends_with_the_finish_reason(client: LocalEngineClient) -> None:
    outputs = await collect(client, make_request(n=3))

    for index in range(3):
        own = [output for output in outputs if output.index == index]
        assert [token for output in own for token in output.token_ids] == expected_output(
            [1, 2, 3], 6
        )
        reasons = [output.finish_reason for output in own]
        assert reasons == [None] * (len(own) - 1) + [FinishReason.LENGTH]


class GatedRunner(FakeRunner):
    """Runs a step only when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.num_asked = 0

    def begin(self, plan: StepPlan) -> None:
        self.num_asked += 1
        assert self.gate.acquire(timeout=30)
        super().begin(plan)


async def test_an_abort_reaches_the_engine_within_two_steps(make_client: MakeClient) -> None:
    runner = GatedRunner()
    client = make_client(runner)
    other = client.generate(make_request("other", max_tokens=50))
    leaving = client.generate(make_request("leaving", max_tokens=50))
    firsts = [asyncio.ensure_future(anext(stream)) for stream in (other, leaving)]
    await asyncio.sleep(0.05)  # both are submitted; at most the first step is under way
    runner.gate.release(3)
    await asyncio.gather(*firsts)
    while runner.num_asked < 4:  # the fourth step is under way, and waits
        await asyncio.sleep(0.005)

    await leaving.aclose()
    runner.gate.release(100)
    _ = [output async for output in other]

    rows = [len(plan.rows) for plan in runner.plans]
    assert rows[3] == 2
    assert set(rows[5:]) == {1}


@pytest.mark.parametrize(("name", "num_ended"), [("r1", 1), (None, 3)])
async def test_an_abort_ends_the_streams_that_it_names(
    client: LocalEngineClient, name: str | None, num_ended: int
) -> None:
    streams = {f"r{number}": await begin(client, f"r{number}") for number in range(3)}

    assert await client.abort(name) == num_ended

    for ended in streams.keys() if name is None else [name]:
        rest = [output async for output in streams[ended]]
        assert rest[-1].finish_reason is FinishReason.ABORT


async def test_a_full_queue_refuses_with_a_hint_and_takes_requests_again_later(
    client: LocalEngineClient,
) -> None:
    streams = [client.generate(make_request(f"r{i}", max_tokens=4000)) for i in range(6)]
    firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await asyncio.sleep(0)

    with pytest.raises(QueueFull) as refusal:
        await collect(client, make_request("late"))
    await client.abort(None)
    for first, stream in zip(firsts, streams, strict=True):
        await first
        await stream.aclose()

    assert refusal.value.retry_after_s >= 1
    assert len(await collect(client, make_request("again"))) >= 1


async def test_one_id_cannot_be_used_twice_at_once(client: LocalEngineClient) -> None:
    stream = await begin(client, "same")

    with pytest.raises(InvalidRequest, match="in use"):
        await collect(client, make_request("same"))
    await stream.aclose()


async def test_an_id_may_come_back_as_soon_as_its_stream_is_closed(
    client: LocalEngineClient,
) -> None:
    for _ in range(20):
        stream = await begin(client, "same")
        await stream.aclose()
        sampling = SamplingParams(max_tokens=3, temperature=0.0)
        request = Request(request_id="same", prompt_ids=[9, 8, 7], sampling=sampling)

        ids = [t for output in await collect(client, request) for t in output.token_ids]

        assert ids == expected_output([9, 8, 7], 3)


async def test_bad_token_ids_leave_no_open_stream_behind(client: LocalEngineClient) -> None:
    sampling = SamplingParams(max_tokens=3)
    for _ in range(20):
        with pytest.raises(InvalidRequest, match="0 to 49"):
            await collect(client, Request(request_id="r", prompt_ids=[1, -1], sampling=sampling))

    assert await client.drain(0.0)
    assert client.stats().num_waiting == 0


async def test_flushing_a_closed_engine_fails_instead_of_waiting(
    client: LocalEngineClient,
) -> None:
    client.close()

    with pytest.raises(EngineError):
        await asyncio.wait_for(client.flush_cache(), 10)


async def test_an_answer_that_was_complete_is_read_although_the_engine_failed_since(
    client: LocalEngineClient,
) -> None:
    stream = client.generate(make_request(max_tokens=6))
    first = await anext(stream)
    while client.stats().finished_total == 0:
        await asyncio.sleep(0.005)
    client.close()

    rest = [output async for output in stream]

    ids = [token for output in (first, *rest) for token in output.token_ids]
    assert ids == expected_output([1, 2, 3], 6)


async def test_a_failing_step_fails_open_streams_and_health(
    client: LocalEngineClient, runner: FakeRunner
) -> None:
    runner.error = RuntimeError("device lost")

    with pytest.raises(EngineError, match="device lost"):
        await collect(client, make_request())
    with pytest.raises(EngineError):
        client.check_health()
    with pytest.raises(EngineError):
        await collect(client, make_request("next"))


@pytest.mark.parametrize(
    ("fault", "error", "code"),
    [
        (NOT_FINITE, NotFinite, None),
        (RowFault("its grammar is slow", of_request=True), InvalidRequest, "constraint_failed"),
    ],
)
async def test_a_row_that_fails_ends_its_own_request_only(
    client: LocalEngineClient,
    runner: FakeRunner,
    fault: RowFault,
    error: type[EngineError | InvalidRequest],
    code: str | None,
) -> None:
    runner.bad_rows, runner.fault = {0}, fault

    with pytest.raises(error, match=fault.reason) as caught:
        await collect(client, make_request("bad"))
    runner.bad_rows = set()

    assert getattr(caught.value, "code", None) == code
    client.check_health()
    assert (await collect(client, make_request("good")))[-1].finish_reason is FinishReason.LENGTH


async def test_draining_refuses_new_requests_and_lets_open_ones_finish(
    client: LocalEngineClient,
) -> None:
    stream = client.generate(make_request(max_tokens=200))
    await anext(stream)
    draining = asyncio.create_task(client.drain(30))
    await asyncio.sleep(0)

    with pytest.raises(Unavailable):
        await collect(client, make_request("late"))
    rest = [output async for output in stream]

    assert rest[-1].finish_reason is FinishReason.LENGTH
    assert await draining


async def test_what_a_drain_does_not_wait_for_ends_with_an_error(
    client: LocalEngineClient,
) -> None:
    stream = await begin(client)

    assert not await client.drain(0.0)

    with pytest.raises(Unavailable, match="stopped during this answer"):
        [output async for output in stream]
    assert await client.drain(10)


async def test_flushing_is_refused_while_requests_run(client: LocalEngineClient) -> None:
    stream = await begin(client)

    assert not await client.flush_cache()
    await stream.aclose()
    await settle(client)

    assert await client.flush_cache()
    assert client.stats().num_cached_pages == 0


async def test_the_pages_of_a_finished_request_are_told_by_their_hashes(
    client: LocalEngineClient,
) -> None:
    outputs = await collect(client, make_request(max_tokens=6))
    await settle(client)
    ids = [1, 2, 3, *(token for output in outputs for token in output.token_ids)]

    hashes = await client.page_hashes(100)

    assert hashes == page_hashes(Namespace(), ids[:8], 4)  # the last token has no KV


@pytest.mark.parametrize("again", [False, True])
async def test_a_stream_that_is_cancelled_at_any_moment_leaves_no_page(
    client: LocalEngineClient, again: bool
) -> None:
    async with nothing_left():
        for moment in range(40):
            reading = collect(client, make_request(max_tokens=4000, n=2))
            await cancelled(reading, moment, again=again)
            assert not client._streams
            assert client._num_open.total() == 0

    assert await client.drain(10)
    await settle(client)
    assert client.stats().aborted_total > 0
    assert client.stats().num_held_pages == 0
    assert await client.flush_cache()
    assert client.stats().num_cached_pages == 0


@pytest.mark.parametrize("again", [False, True])
async def test_a_question_that_is_cancelled_at_any_moment_is_forgotten(
    client: LocalEngineClient, again: bool
) -> None:
    async with nothing_left():
        for moment in range(8):
            for asking in (
                client.is_waiting("a"),
                client.page_hashes(3),
                client.exchange(lambda: None),
                client.failed(),
                client.drain(0.0),
            ):
                await cancelled(asking, moment, again=again)
            assert not client._questions


class Repairs:
    """Repairs a client's engine when the test says so."""

    def __init__(self, client: LocalEngineClient, runner: FakeRunner, engine: Engine) -> None:
        self.client, self.runner, self.engine = client, runner, engine
        self.may_go_on = asyncio.Event()
        self.error: Exception | None = None
        self.failures: list[str] = []
        client.repair_with(self.repair)

    async def repair(self, failure: EngineError) -> None:
        self.failures.append(str(failure))
        await self.may_go_on.wait()
        if self.error is not None:
            raise self.error
        await self.client.restart(self.work, stop_s=10)

    def work(self) -> None:
        self.runner.error = None
        self.runner.work.clear()
        self.runner.memory.clear()
        self.engine.restart()


@pytest.fixture
async def repairs(runner: FakeRunner) -> AsyncIterator[Repairs]:
    engine = make_engine(make_plan(max_model_len=4096, num_pages=1200), runner)
    client = LocalEngineClient(engine, None)
    yield Repairs(client, runner, engine)
    client.close()


async def fail(repairs: Repairs) -> None:
    """Let the engine fail in the middle of an answer."""
    stream = await begin(repairs.client, "lost")
    repairs.runner.error = EngineError("rank 1 is gone")
    with pytest.raises(EngineError, match="rank 1 is gone"):
        [output async for output in stream]


async def test_requests_wait_while_the_engine_is_repaired(repairs: Repairs) -> None:
    client = repairs.client
    right = await collect(client, make_request())
    await fail(repairs)

    client.check_health()
    waiting = asyncio.create_task(collect(client, make_request("waits")))
    aborted = asyncio.create_task(collect(client, make_request("aborted", max_tokens=4000)))
    asked = asyncio.create_task(client.page_hashes(9))
    await asyncio.sleep(0)
    assert await client.abort("aborted") == 1
    assert not waiting.done()
    repairs.may_go_on.set()

    async with asyncio.timeout(20):
        assert await asked == b""  # the cache is empty
        assert _ids(await waiting) == _ids(right)
        assert (await aborted)[-1].finish_reason is FinishReason.ABORT
        await settle(client)
    assert repairs.failures == ["rank 1 is gone"]
    assert client.num_failures == 1
    repairs.engine.check_integrity()
    assert client.stats().num_held_pages == 0


def _ids(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def test_an_engine_fails_again_and_is_repaired_again(repairs: Repairs) -> None:
    repairs.may_go_on.set()
    for _ in range(3):
        await fail(repairs)
        outputs = await asyncio.wait_for(collect(repairs.client, make_request()), 20)
        assert _ids(outputs) == expected_output([1, 2, 3], 6)
    assert repairs.client.num_failures == 3


async def test_what_cannot_be_repaired_ends_the_requests_that_wait(repairs: Repairs) -> None:
    await fail(repairs)
    waiting = asyncio.create_task(collect(repairs.client, make_request("waits")))
    await asyncio.sleep(0)
    repairs.error = EngineError("no place for rank 1")
    repairs.may_go_on.set()

    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match="rank 1 is gone"):
            await waiting
        assert str(await repairs.client.failed()) == "rank 1 is gone"
    with pytest.raises(EngineError, match="rank 1 is gone"):
        repairs.client.check_health()


async def test_closing_ends_the_requests_that_wait_for_a_repair(
    repairs: Repairs, runner: FakeRunner
) -> None:
    await fail(repairs)
    waiting = asyncio.create_task(collect(repairs.client, make_request("waits")))
    await asyncio.sleep(0)

    repairs.client.close()
    repairs.may_go_on.set()

    async with asyncio.timeout(20):
        with pytest.raises(EngineError):
            await waiting
    assert runner.is_closed


async def test_a_step_that_does_not_end_cannot_be_repaired() -> None:
    runner = GatedRunner()
    engine = make_engine(make_plan(), runner)
    client = LocalEngineClient(engine, None)
    reasons: list[str] = []

    async def repair(failure: EngineError) -> None:
        try:
            await client.restart(engine.restart, stop_s=0.05)
        except EngineError as error:
            reasons.append(str(error))
            raise

    client.repair_with(repair)
    asking = asyncio.create_task(collect(client, make_request()))
    while runner.num_asked == 0:
        await asyncio.sleep(0.005)
    client.fail(EngineError("rank 1 hangs"))

    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match="rank 1 hangs"):
            await asking
        await client.failed()
    assert reasons == ["The step in progress has not ended for 0.05 s."]
    runner.gate.release()
    client.close()
