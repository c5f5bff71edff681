"""Files and batches, through the openai client and on disk."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from remora.configs.errors import ConfigError, EngineError, QueueFull
from remora.deployments.http.app import build_http_app
from remora.deployments.http.batches import files
from remora.deployments.http.batches import runner as batches_runner
from remora.deployments.http.batches import store as batches
from remora.deployments.http.batches import upload as files_upload
from remora.deployments.http.batches.results import Result, Results
from remora.deployments.http.batches.runner import LOWEST_PRIORITY, BatchRunner
from remora.deployments.http.batches.store import BatchStore
from remora.deployments.http.core.auth import Access, Keys
from remora.deployments.http.endpoints import BATCH_ENDPOINTS
from remora.deployments.http.generation.server_state import ServerState
from tests.deployments.fakes import FakeEngine, FakeServer, make_config, make_plan
from tests.moments import cancelled, end, nothing_left, steps

URL, FILES = "/v1/chat/completions", "http://remora/v1/files"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_runner, "TICK_S", 0.001)
    monkeypatch.setattr(batches_runner, "SAVE_S", 0.0)


def make_server(folder: Path, engine: FakeEngine | None = None, **plan: Any) -> FakeServer:
    config = make_config(batch_dir=str(folder))
    return FakeServer(engine or FakeEngine(), plan=make_plan(**plan), config=config)


@asynccontextmanager
async def opened(
    server: FakeServer, access: Access | None = None, key: str = "EMPTY"
) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    app = build_http_app(ServerState.over(server), access=lambda: access or Access(is_local=True))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    http: Any = httpx.AsyncClient(transport=transport)
    async with (
        openai.AsyncOpenAI(base_url="http://remora/v1", api_key=key, http_client=http) as client,
    ):
        yield client


def make_runner(server: FakeServer) -> tuple[BatchRunner, BatchStore]:
    store = BatchStore(Path(str(server.config.api.batch_dir)))
    return BatchRunner(ServerState.over(server), store, BATCH_ENDPOINTS), store


def make_line(name: str, url: str = URL, **body: Any) -> dict[str, Any]:
    content = body or {"messages": [{"role": "user", "content": name}]}
    return {"custom_id": name, "method": "POST", "url": url, "body": content}


def make_lines(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def start(client: openai.AsyncOpenAI, *lines: Any, endpoint: Any = URL) -> Any:
    file = await client.files.create(file=("in.jsonl", make_lines(*lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


async def run(client: openai.AsyncOpenAI, server: FakeServer, *lines: Any, **options: Any) -> Batch:
    """Run a batch of these lines until it ends."""
    made = await start(client, *lines, **options)
    await make_runner(server)[0].run_next()
    return await client.batches.retrieve(made.id)


async def errors_of(client: openai.AsyncOpenAI, server: FakeServer, *lines: Any) -> Any:
    """Run a batch; return its status and the lines of its error file."""
    done = await run(client, server, *lines)
    return done, await read_lines(client, done.error_file_id)


async def read_lines(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    content = await client.files.content(file_id)
    return {line["custom_id"]: line for line in map(json.loads, content.text.splitlines())}


def parents_of(folder: Path, prefix: str) -> set[Path]:
    return {path.parent for path in folder.rglob(f"{prefix}*")}


# -- files -----------------------------------------------------------------------------------------


async def test_a_file_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    async with opened(make_server(tmp_path)) as client:
        made = await client.files.create(file=("../../x\n.jsonl", data), purpose="batch")
        found = await client.files.retrieve(made.id)
        listed = [file.id async for file in client.files.list(purpose="batch")]
        content = await client.files.content(made.id)
        parents = parents_of(tmp_path, made.id)
        deleted = await client.files.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.files.content(made.id)

    assert (made.bytes, made.purpose, made.status) == (len(data), "batch", "processed")
    assert found == made
    assert listed == [made.id]
    assert content.content == data
    assert parents == {tmp_path / "files"}
    assert deleted.deleted
    assert not parents_of(tmp_path, "file-")


@pytest.mark.parametrize("name", ["file-x", "..", "%2e%2e%2fsecret", "file-" + "0" * 32, "x%00"])
async def test_a_name_that_is_not_ours_is_not_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("secret")
    async with opened(make_server(tmp_path / "store")) as client:
        for path in (f"/files/{name}", f"/files/{name}/content", f"/batches/{name}"):
            with pytest.raises(openai.NotFoundError):
                await client.get(path, cast_to=object)


async def test_an_upload_may_be_as_large_as_the_limit_with_or_without_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_upload, "MAX_UPLOAD_BYTES", 100_000)
    form: dict[str, Any] = {"data": {"purpose": "batch"}}
    room = 100_000 - len(httpx.Request("POST", "http://x", files={"file": b""}, **form).read())

    async def endless() -> AsyncGenerator[bytes, None]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
        while True:
            yield b"x" * 10_000

    async with opened(make_server(tmp_path)) as client:
        send = client._client.post
        whole = [await send(FILES, files={"file": b"x" * (room + n)}, **form) for n in (0, 1)]
        headers = {"content-type": "multipart/form-data; boundary=b"}
        unending = await send(FILES, content=endless(), headers=headers)
    assert [response.status_code for response in (*whole, unending)] == [200, 413, 413]


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"content-type": "application/json"}, b"{}", 415),
        ({"content-type": "multipart/form-data"}, b"{}", 400),
        ({"content-type": "multipart/form-data; boundary=b"}, b"nothing of the kind", 400),
        ({"content-type": "multipart/form-data; boundary=b"}, b"--b--\r\n", 400),
    ],
)
async def test_a_malformed_form_is_refused(
    tmp_path: Path, headers: dict[str, str], content: bytes, status: int
) -> None:
    async with opened(make_server(tmp_path)) as client:
        response = await client._client.post(FILES, content=content, headers=headers)
    assert (response.status_code, bool(response.json()["error"]["message"])) == (status, True)


async def test_only_batch_is_a_purpose(tmp_path: Path) -> None:
    async with opened(make_server(tmp_path)) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.files.create(file=b"{}", purpose="fine-tune")
    assert caught.value.param == "purpose"


async def test_a_full_store_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 1)
    async with opened(make_server(tmp_path)) as client:
        made = await client.files.create(file=b"{}", purpose="batch")
        with pytest.raises(openai.BadRequestError, match="full"):
            await client.files.create(file=b"{}", purpose="batch")
        await client.files.delete(made.id)
        await client.files.create(file=b"{}", purpose="batch")


async def test_an_old_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "KEPT_S", 0)
    async with opened(make_server(tmp_path)) as client:
        await client.files.create(file=b"{}", purpose="batch")
        assert [file async for file in client.files.list()] == []
    assert not parents_of(tmp_path, "file-")


@pytest.mark.parametrize("is_local", [False, True])
async def test_callers_do_not_see_each_others_files_and_the_operator_sees_all(
    tmp_path: Path, is_local: bool
) -> None:
    server = make_server(tmp_path)
    keys, admin_keys = Keys(["a", "b"]), Keys(["operator"])
    access = Access(keys=keys, admin_keys=admin_keys, is_local=is_local)
    async with (
        opened(server, access, "a") as one,
        opened(server, access, "b") as other,
        opened(server, access, "operator") as operator,
    ):
        batch = await start(one, make_line("x"))
        for attempt in (other.files.retrieve, other.files.content):
            with pytest.raises(openai.NotFoundError):
                await attempt(batch.input_file_id)
        assert [b.id async for b in one.batches.list()] == [batch.id]
        with pytest.raises(openai.NotFoundError):
            await other.batches.cancel(batch.id)
        assert [file async for file in other.files.list()] == []
        assert [b async for b in other.batches.list()] == []
        assert [b.id async for b in operator.batches.list()] == [batch.id]


async def test_without_a_folder_the_routes_say_what_is_missing() -> None:
    async with opened(FakeServer()) as client:
        with pytest.raises(openai.NotFoundError, match=r"api\.batch_dir"):
            await client.batches.list()
        with pytest.raises(openai.NotFoundError, match=r"api\.batch_dir"):
            await client.files.create(file=b"{}", purpose="batch")


@pytest.mark.parametrize("folder", ["batches", "/dev/null/batches"])
def test_a_folder_that_cannot_be_kept_is_a_config_error(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"api\.batch_dir"):
        BatchStore(Path(folder))


# -- batches ---------------------------------------------------------------------------------------


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
    url: str, body: dict[str, Any], tmp_path: Path
) -> None:
    server = make_server(tmp_path)
    async with opened(server) as client:
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


async def test_a_batch_is_the_clients_at_every_time(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    async with opened(server) as client:
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
    tmp_path: Path, line: Any, param: str | None
) -> None:
    server = make_server(tmp_path)
    async with opened(server) as client:
        done = await run(client, server, make_line("ok"), line)
    assert done.status == "failed"
    assert done.errors is not None
    assert done.errors.data is not None
    assert [(fault.line, fault.param) for fault in done.errors.data] == [(2, param)]
    assert not server.client.requests


async def test_an_empty_file_and_a_deleted_one_fail(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    async with opened(server) as client:
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
async def test_a_malformed_batch_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    async with opened(make_server(tmp_path)) as client:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "WINDOW_S", -1)
    server = make_server(tmp_path)
    async with opened(server) as client:
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


async def test_a_request_that_ends_the_server_each_time_is_given_up(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    async with opened(server) as client:
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
    assert errors["x"]["response"]["status_code"] == 500


async def test_too_many_batches_are_refused_for_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_OPEN_BATCHES", 1)
    async with opened(make_server(tmp_path)) as client:
        await start(client, make_line("x"))
        with pytest.raises(openai.RateLimitError):
            await start(client.with_options(max_retries=0), make_line("y"))


async def test_batches_are_listed_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    clock = iter(range(100))
    monkeypatch.setattr(
        "remora.deployments.http.batches.store.time.time", lambda: now + next(clock)
    )
    async with opened(make_server(tmp_path)) as client:
        made = [(await start(client, make_line("x"))).id for _ in range(3)]
        first = await client.batches.list(limit=2)
        everything = [batch.id async for batch in client.batches.list(limit=2)]
    assert first.has_more
    assert everything == made[::-1]


async def test_a_run_that_is_cancelled_holds_the_batch_until_no_thread_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    append = Results.append

    def slow(results: Results, new: list[Result]) -> None:
        if new:
            begun.set()
            may_end.wait(10)
        append(results, new)

    monkeypatch.setattr(Results, "append", slow)
    server = make_server(tmp_path)
    async with opened(server) as client:
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


class Form:
    """A form that arrives in several pieces."""

    def __init__(self) -> None:
        head = 'Content-Disposition: form-data; name="'
        file = head + 'file"; filename="x"\r\n\r\n0123456789'
        form = f'--b\r\n{file}\r\n--b\r\n{head}purpose"\r\n\r\nbatch\r\n--b--\r\n'.encode()
        self._pieces = [form[:70], form[70:-20], form[-20:]]

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}

    async def send(self, message: Any) -> None:
        pass


async def test_an_upload_that_is_cancelled_at_any_moment_is_whole_or_gone(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    app = build_http_app(ServerState.over(server), access=lambda: Access(is_local=True))
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/files",
        "query_string": b"",
        "headers": [(b"content-type", b"multipart/form-data; boundary=b")],
    }
    async with nothing_left():
        for moment in range(40):
            form = Form()
            await cancelled(app(dict(scope), form.receive, form.send), moment)
    # Wait for threads that had begun to copy.
    await asyncio.get_running_loop().shutdown_default_executor()

    kept = BatchStore(tmp_path).files.seen_by(None)
    assert all(file.bytes == 10 for file in kept)
    names = {file.id for file in kept}
    assert {path.stem for path in (tmp_path / "files").iterdir()} == names
    assert not any(str(tmp_path) in os.readlink(path) for path in open_paths())


def open_paths() -> list[Path]:
    return [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
