"""A paused engine takes no steps and loses no request; requests over a limit of time end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from remora.configs.errors import Unavailable
from remora.configs.planning.scheduling_plan import SchedulingPlan, plan_scheduling
from remora.configs.schema import ServeConfig
from remora.engine.client import LocalEngineClient
from remora.engine.types import FinishReason, Output, Request, SamplingParams, SequenceOutput
from tests.engine.fakes import FakeRunner, expected_output, make_engine, make_plan

PROMPT = [1, 2, 3]
LENGTH = 300


def make_request(name: str, max_tokens: int = LENGTH) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(request_id=name, prompt_ids=PROMPT, sampling=sampling)


async def collect(client: LocalEngineClient, request: Request) -> list[Output]:
    async with aclosing(client.generate(request)) as outputs:
        return [output async for output in outputs]


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.fixture(params=[False, True], ids=["one by one", "overlapping"])
async def client(
    request: pytest.FixtureRequest, runner: FakeRunner
) -> AsyncIterator[LocalEngineClient]:
    plan = make_plan(max_model_len=4096, num_pages=1200)
    client = LocalEngineClient(make_engine(plan, runner, overlap=request.param), None)
    yield client
    client.close()


@pytest.mark.parametrize("retracting", [False, True])
async def test_requests_go_on_after_a_pause_as_if_there_had_been_none(
    client: LocalEngineClient, runner: FakeRunner, retracting: bool
) -> None:
    stream = client.generate(make_request("running"))
    first = await anext(stream)
    await client.pause(retracting=retracting)
    num_steps = len(runner.plans)
    late = asyncio.create_task(collect(client, make_request("late", 5)))
    while client.stats().num_running + client.stats().num_waiting < 2:
        await asyncio.sleep(0.005)

    assert client.is_paused
    assert client.stats().num_running == (0 if retracting else 1)
    assert (client.stats().num_held_pages == 0) is retracting
    assert len(runner.plans) == num_steps
    with pytest.raises(Unavailable, match="paused"):
        await client.exchange(lambda: None)
    await client.unpause()

    rest = [output async for output in stream]
    assert tokens_of([first, *rest]) == expected_output(PROMPT, LENGTH)
    assert tokens_of(await late) == expected_output(PROMPT, 5)


async def test_an_abort_reaches_paused_requests_whether_they_ran_or_wait(
    client: LocalEngineClient,
) -> None:
    stream = client.generate(make_request("running"))
    await anext(stream)
    await client.pause(retracting=True)
    late = asyncio.create_task(collect(client, make_request("late")))
    while client.stats().num_waiting < 2:
        await asyncio.sleep(0.005)

    assert await client.abort(None) == 2
    assert [output async for output in stream][-1].finish_reason is FinishReason.ABORT
    assert (await late)[-1].finish_reason is FinishReason.ABORT
    assert client.is_paused


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def faults(outputs: list[SequenceOutput]) -> dict[str, str]:
    return {o.request_id: o.error.limit for o in outputs if o.error is not None}


@pytest.mark.observes("limits.waiting_timeout_s", "limits.running_timeout_s")
def test_requests_end_that_wait_or_run_for_too_long() -> None:
    clock = Clock()
    limits = {"waiting_timeout_s": 5, "running_timeout_s": 20}
    config = ServeConfig.model_validate({"model": {"path": "tiny"}, "limits": limits})
    rules = plan_scheduling(config)
    plan = make_plan(max_model_len=4096, num_pages=1200, max_running_requests=1, scheduling=rules)
    engine = make_engine(plan, clock=clock)
    for name in ("runs", "waits"):
        engine.add(make_request(name))
    assert faults(engine.step()) == {}
    clock.now_s = 4.0
    assert faults(engine.step()) == {}
    engine.pause(retracting=True)  # a pause is no time, and what is retracted waits anew
    clock.now_s = 100.0
    engine.unpause()
    assert faults(engine.step()) == {}
    clock.now_s = 106.0
    assert faults(engine.step()) == {"waits": "waiting_timeout_s"}
    clock.now_s = 127.0
    assert faults(engine.step()) == {"runs": "running_timeout_s"}
    assert not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize(
    ("limit", "rules"),
    [
        ("waiting_timeout_s", SchedulingPlan(waiting_timeout_s=0.0)),
        ("running_timeout_s", SchedulingPlan(running_timeout_s=0.0)),
    ],
)
async def test_the_reader_of_a_request_over_its_time_gets_an_error_that_names_the_limit(
    limit: str, rules: SchedulingPlan
) -> None:
    plan = make_plan(max_model_len=4096, num_pages=1200, max_running_requests=1, scheduling=rules)
    client = LocalEngineClient(make_engine(plan), None)
    try:
        results = await asyncio.gather(
            *(collect(client, make_request(name, 4000)) for name in ("a", "b")),
            return_exceptions=True,
        )
    finally:
        client.close()
    refused = [error for error in results if isinstance(error, Unavailable)]
    assert refused
    assert {error.limit for error in refused} == {limit}
