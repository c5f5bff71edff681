"""Batches, through the openai client and on disk."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from remora.configs.errors import EngineError, QueueFull
from remora.deployments.http.batches import runner as batches_runner
from remora.deployments.http.batches import store as batches
from remora.deployments.http.batches.results import Result, Results
from remora.deployments.http.batches.runner import LOWEST_PRIORITY
from tests.deployments.fakes import FakeEngine, FakeServer, make_plan
from tests.deployments.http.batches.jobs import (
    URL,
    Client,
    errors_of,
    make_line,
    make_runner,
    make_server,
    opened,
    read_lines,
    run,
    start,
)
from tests.moments import cancelled, end, nothing_left, steps


async def test_a_batch_runs_and_its_results_are_files(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    bad = make_line("bad", messages=[])
    async with opened(server) as client:
        done, errors = await errors_of(client, server, make_line("one"), bad, make_line("two"))
        output = await read_lines(client, done.output_file_id)

    assert (done.status, done.metadata) == ("completed", {"a": "b"})
    assert done.in_progress_at
    assert done.completed_at
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert output.keys() == {"one", "two"}
    body = output["one"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "Paris."
    for line in (*output.values(), *errors.values()):
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert set(line["response"]) == {"status_code", "request_id", "body"}
        assert line["error"] is None
    assert errors["bad"]["response"]["status_code"] == 400
    assert errors["bad"]["response"]["body"]["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (URL, {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/completions", {"prompt": "Hi"}),
    ],
)
async def test_a_batch_counts_the_tokens_of_its_answers(
    server: FakeServer, client: Client, url: str, body: dict[str, Any]
) -> None:
    lines = [make_line(name, url, **body) for name in ("one", "two")]
    done = await run(client, server, *lines, make_line("bad", url, input=7), endpoint=url)

    prompt = server.client.requests[0].prompt_ids
    assert done.usage is not None
    assert done.usage.model_dump() == {
        "input_tokens": 2 * len(prompt),
        "input_tokens_details": {"cached_tokens": 2 * 2},
        "output_tokens": 2 * len("Paris."),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 2 * (len(prompt) + len("Paris.")),
    }
    assert done.model == "tiny"


async def test_a_batch_is_the_clients_at_every_time(server: FakeServer, client: Client) -> None:
    made = await start(client, make_line("one"), make_line("bad", messages=[]))
    failed = await start(client, {"custom_id": "x"})
    objects = []
    for number in range(3):
        objects += [await client.batches.retrieve(one.id) for one in (made, failed)]
        if number < 2:
            await make_runner(server)[0].run_next()

    for batch in objects:
        parsed = Batch.model_validate(batch.model_dump(warnings="error"))
        assert not parsed.model_extra
        assert parsed.model_fields_set == set(Batch.model_fields)
        assert parsed.usage is not None
    assert {batch.status for batch in objects} == {"validating", "completed", "failed"}
    errors = objects[-1].errors
    assert errors is not None
    assert errors.data is not None
    assert (errors.data[0].line, errors.data[0].param) == (1, "method")


@pytest.mark.parametrize(("low_first", "priority"), [(False, LOWEST_PRIORITY), (True, 2**31 - 1)])
async def test_lines_have_the_lowest_priority(
    tmp_path: Path, low_first: bool, priority: int
) -> None:
    server = make_server(tmp_path, low_priority_first=low_first)
    async with opened(server) as client:
        messages = [{"role": "user", "content": "x"}]
        await run(client, server, make_line("x", messages=messages, priority=9))
    assert [request.priority for request in server.client.requests] == [priority]


async def test_half_of_the_rows_are_left_to_online_requests(tmp_path: Path) -> None:
    server = make_server(tmp_path, FakeEngine(gate=asyncio.Event()), max_running_requests=4)
    async with opened(server) as client:
        await start(client, *(make_line(str(n)) for n in range(5)))
        task = asyncio.create_task(make_runner(server)[0].run_next())
        while len(server.client.running) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        most = len(server.client.running)
        assert server.client.gate is not None
        server.client.gate.set()
        await task
    assert most == 2
    assert len(server.client.requests) == 5


async def test_nothing_starts_while_a_request_waits(tmp_path: Path) -> None:
    engine = FakeEngine()
    idle = engine.stats()
    busy = type(idle)(**{name: getattr(idle, name) for name in idle.__slots__} | {"num_waiting": 1})
    engine.stats = lambda: busy  # type: ignore[method-assign]
    server = make_server(tmp_path, engine)
    async with opened(server) as client:
        await start(client, make_line("x"))
        task = asyncio.create_task(make_runner(server)[0].run_next())
        await asyncio.sleep(0.05)
        started = list(engine.requests)
        engine.stats = lambda: idle  # type: ignore[method-assign]
        await task
    assert not started
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("line", "param"),
    [
        (make_line("x", url="/v1/completions"), "url"),
        (make_line("ok"), "custom_id"),
        (make_line("x") | {"method": "GET"}, "method"),
        (make_line("x") | {"custom_id": 1}, "custom_id"),
        (make_line("x", stream=True), "body.stream"),
        ([], None),
    ],
)
async def test_a_file_with_a_wrong_line_fails_before_anything_runs(
    server: FakeServer, client: Client, line: Any, param: str | None
) -> None:
    done = await run(client, server, make_line("ok"), line)
    assert done.status == "failed"
    assert done.errors is not None
    assert done.errors.data is not None
    assert [(fault.line, fault.param) for fault in done.errors.data] == [(2, param)]
    assert not server.client.requests


async def test_an_empty_file_and_a_deleted_one_fail(server: FakeServer, client: Client) -> None:
    empty, lost = await start(client), await start(client, make_line("x"))
    await client.files.delete(lost.input_file_id)
    runner, _ = make_runner(server)
    assert await runner.run_next()
    assert await runner.run_next()
    assert not await runner.run_next()
    found = [(await client.batches.retrieve(batch.id)).status for batch in (empty, lost)]
    assert found == ["failed", "failed"]


@pytest.mark.parametrize(
    "changes", [{"endpoint": "/generate"}, {"completion_window": "1h"}, {"input_file_id": "file-x"}]
)
async def test_a_malformed_batch_is_refused(client: Client, changes: dict[str, Any]) -> None:
    file = await client.files.create(file=b"{}", purpose="batch")
    body = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h"}
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
        await client.post("/batches", body=body | changes, cast_to=object)


async def test_a_cancelled_batch_stops_and_keeps_what_it_has(tmp_path: Path) -> None:
    server = make_server(tmp_path, FakeEngine(gate=asyncio.Event()))
    async with opened(server) as client:
        made = await start(client, *(make_line(str(n)) for n in range(9)))
        task = asyncio.create_task(make_runner(server)[0].run_next())
        while not server.client.running:
            await asyncio.sleep(0.001)
        cancelling = await client.batches.cancel(made.id)
        await task
        done = await client.batches.retrieve(made.id)
        with pytest.raises(openai.ConflictError):
            await client.with_options(max_retries=0).batches.cancel(made.id)
    assert (cancelling.status, done.status) == ("cancelling", "cancelled")
    async with asyncio.timeout(10):
        while server.client.running:
            await asyncio.sleep(0.001)
    assert len(server.client.requests) < 9


async def test_what_is_left_when_the_time_is_over_expires(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "WINDOW_S", -1)
    done, errors = await errors_of(client, server, make_line("x"))
    assert done.status == "expired"
    assert errors["x"]["error"]["code"] == "batch_expired"
    assert not server.client.requests


async def test_another_replica_goes_on_where_one_stopped(tmp_path: Path) -> None:
    gate = asyncio.Event()
    server = make_server(tmp_path, FakeEngine(gate=gate), max_running_requests=2)
    async with opened(server) as client:
        made = await start(client, *(make_line(str(n)) for n in range(3)))
        runner, store = make_runner(server)
        task = asyncio.create_task(runner.run_next())
        while not server.client.running:
            await asyncio.sleep(0.001)
        assert not await make_runner(server)[0].run_next()  # the other runner holds its lock
        gate.set()
        while not (batch := store.read(made.id)) or batch.completed < 1:
            await asyncio.sleep(0.001)
        gate.clear()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with store.files.data_path(batch.output).open("ab") as torn:
            torn.write(b'{"custom_id": "to')
        num_done = len(store.files.data_path(batch.output).read_bytes().splitlines()) - 1
        gate.set()
        successor = make_server(tmp_path)
        assert await make_runner(successor)[0].run_next()
        done = await client.batches.retrieve(made.id)
        output = await read_lines(client, done.output_file_id)

    assert done.status == "completed"
    assert output.keys() == {"0", "1", "2"}
    assert done.usage is not None
    assert done.usage.output_tokens == 3 * len("Paris.")
    assert len(successor.client.requests) == 3 - num_done


async def test_a_request_that_ends_the_server_each_time_is_given_up(
    server: FakeServer, client: Client
) -> None:
    made = await start(client, make_line("poison"), make_line("fine"))
    runner, store = make_runner(server)
    store.starts_path(made.id).write_text("1\n1\n1\n2\n")
    await runner.run_next()
    done = await client.batches.retrieve(made.id)
    errors = await read_lines(client, done.error_file_id)
    assert errors["poison"]["error"]["code"] == "server_error"
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
    assert len(server.client.requests) == 1


async def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    engine = FakeEngine(error=QueueFull("full", 0.001))
    server = make_server(tmp_path, engine)
    async with opened(server) as client:
        made = await start(client, make_line("x"))
        task = asyncio.create_task(make_runner(server)[0].run_next())
        while len(engine.requests) < 3:
            await asyncio.sleep(0.001)
        engine.error = None
        await task
        assert (await client.batches.retrieve(made.id)).status == "completed"


async def test_an_engine_that_fails_each_time_fails_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_runner, "ENGINE_RETRY_S", 0.0)
    server = make_server(tmp_path, FakeEngine(error=EngineError("bug")))
    async with opened(server) as client:
        _, errors = await errors_of(client, server, make_line("x"))
    assert errors["x"]["response"]["status_code"] == 503


async def test_a_batch_that_cannot_be_run_fails_and_does_not_hold_up_the_next(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Results.append

    def broken(results: Results, new: list[Result]) -> None:
        if new and new[0].record["custom_id"] == "two":
            raise ValueError("a bug")
        append(results, new)

    monkeypatch.setattr(Results, "append", broken)
    server.plan = make_plan(max_running_requests=2)  # a line at a time
    bad = await start(client, make_line("one"), make_line("two"))
    good = await start(client, make_line("three"))
    runner, _ = make_runner(server)
    assert [await runner.run_next() for _ in range(3)] == [True, True, False]
    failed, done = [await client.batches.retrieve(made.id) for made in (bad, good)]

    assert (failed.status, done.status) == ("failed", "completed")
    assert failed.errors is not None
    assert failed.errors.data is not None
    assert [fault.code for fault in failed.errors.data] == ["server_error"]
    assert (await read_lines(client, failed.output_file_id)).keys() == {"one"}


async def test_a_full_disk_fails_no_batch(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(results: Results, new: list[Result]) -> None:
        raise OSError(28, "No space left on device")

    made = await start(client, make_line("one"))
    runner, _ = make_runner(server)
    with monkeypatch.context() as patch:
        patch.setattr(Results, "append", full)
        with pytest.raises(OSError, match="No space"):
            await runner.run_next()
    assert await runner.run_next()
    assert (await client.batches.retrieve(made.id)).status == "completed"


async def test_too_many_batches_are_refused_for_now(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_OPEN_BATCHES", 1)
    await start(client, make_line("x"))
    with pytest.raises(openai.RateLimitError):
        await start(client.with_options(max_retries=0), make_line("y"))


async def test_batches_are_listed_in_pages(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    clock = iter(range(100))
    monkeypatch.setattr(
        "remora.deployments.http.batches.store.time.time", lambda: now + next(clock)
    )
    made = [(await start(client, make_line("x"))).id for _ in range(3)]
    first = await client.batches.list(limit=2)
    everything = [batch.id async for batch in client.batches.list(limit=2)]
    assert first.has_more
    assert everything == made[::-1]


async def test_a_run_that_is_cancelled_holds_the_batch_until_no_thread_writes(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    append = Results.append

    def slow(results: Results, new: list[Result]) -> None:
        if new:
            begun.set()
            may_end.wait(10)
        append(results, new)

    monkeypatch.setattr(Results, "append", slow)
    made = await start(client, make_line("one"))
    runner, store = make_runner(server)
    running = asyncio.create_task(runner.run_next())
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):
        running.cancel()
        await steps(5)
        with store.claim(made.id) as batch:
            assert batch is None
    may_end.set()
    await end(running)
    with store.claim(made.id) as batch:
        assert batch is not None


async def test_a_run_that_is_cancelled_at_any_moment_is_ended_by_the_next(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    names = {"one", "two", "three"}
    async with opened(server) as client, nothing_left():
        for moment in range(0, 300, 19):
            made = await start(client, *map(make_line, names))
            runner, store = make_runner(server)
            await cancelled(runner.run_next(), moment)
            assert server.client.running == set()
            with store.claim(made.id) as batch:
                has_ended = batch is None
            assert await runner.run_next() is not has_ended
            done = await client.batches.retrieve(made.id)
            content = await client.files.content(str(done.output_file_id))
            found = [json.loads(line)["custom_id"] for line in content.text.splitlines()]
            assert sorted(found) == sorted(names)
            assert done.status == "completed"
