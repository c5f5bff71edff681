"""A client's disconnect aborts its request in the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from itertools import product
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from remora.configs.sections.limits import LimitsSection
from remora.deployments.http.core import body_limits as limits
from remora.deployments.http.core.edge import Edge
from remora.deployments.http.core.sse import Chunk, ChunkWriter, EventStream
from remora.deployments.http.core.wire_formats import OPENAI
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.llm_server import LLMServer
from remora.engine.types import Output
from tests.deployments.connection import Connection
from tests.deployments.fakes import FakeEngine, FakeServer, make_app, make_server_config
from tests.moments import cancelled, end, nothing_left, steps
from tests.thinned import thinned

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True, "n": 2}),
    ("/v1/chat/completions", CHAT | {"stream": True, "tools": TOOLS, "tool_choice": "required"}),
    ("/v1/completions", {"prompt": ["a", "b", "c"]}),
    ("/v1/completions", {"prompt": ["a", "b", "c"], "stream": True}),
    ("/generate", {"text": "a", "stream": True}),
    ("/v1/responses", {"input": "a", "stream": True}),
    ("/v1/messages", CHAT | {"max_tokens": 9, "stream": True}),
]
CALLS = [
    (*body, takes, ends)
    for body, takes, ends in product(
        BODIES, ("all", "nothing"), ("leave", "cancel", "leave and cancel", "cancel again")
    )
]


@asynccontextmanager
async def running(server: FakeServer, path: str, body: Any) -> AsyncGenerator[Connection, None]:
    connection = Connection(make_app(server), path, body)
    async with asyncio.timeout(10):
        while not server.client.running:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        yield connection


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_disconnect_aborts_everything_of_the_call(path: str, body: Any) -> None:
    server = FakeServer(FakeEngine(gate=asyncio.Event()))

    async with running(server, path, body) as connection:
        connection.leave()
        await connection.task

    assert server.client.running == set()
    assert sorted(server.client.closed) == sorted(r.request_id for r in server.client.requests)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_cancelled_handler_aborts_everything_of_the_call(path: str, body: Any) -> None:
    server = FakeServer(FakeEngine(gate=asyncio.Event()))

    async with running(server, path, body) as connection:
        connection.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connection.task

    assert server.client.running == set()


@pytest.mark.parametrize(("path", "body", "takes", "ends"), thinned(CALLS, 5))
async def test_a_call_that_ends_at_any_moment_leaves_nothing_running(
    path: str, body: Any, takes: str, ends: str
) -> None:
    server = FakeServer(FakeEngine(gate=asyncio.Event()))
    app = make_app(server)
    async with nothing_left():
        for moment in range(25):
            connection = Connection(app, path, body, takes_bodies=takes == "all")
            while not server.client.running:
                await asyncio.sleep(0)
            await steps(moment)
            if "leave" in ends:
                connection.leave()
            if ends == "leave and cancel":
                await steps(moment % 5)
            if "cancel" in ends:
                connection.task.cancel()
            await end(connection.task, again=ends == "cancel again")
            assert server.client.running == set(), f"{moment} steps after it began"


async def read(chunks: AsyncGenerator[Any, None]) -> None:
    async with aclosing(chunks):
        async for _ in chunks:
            await steps(3)


@pytest.mark.parametrize("again", [False, True])
async def test_a_call_of_a_python_handle_may_be_cancelled_at_any_moment(again: bool) -> None:
    server = FakeServer(FakeEngine(gate=asyncio.Event()))
    replica = object.__new__(LLMServer)
    replica._served = ServerState.over(server)
    async with nothing_left():
        for moment in range(25):
            for call in (
                read(replica.chat_stream(CHAT)),
                read(replica.generate({"text": "a"})),
                replica.completions({"prompt": ["a", "b"]}),
            ):
                await cancelled(call, moment, again=again)
                assert server.client.running == set(), f"{moment} steps after it began"
    assert server.client.requests


@pytest.mark.observes("limits.keep_alive_s")
async def test_an_idle_stream_gets_comments() -> None:
    config = make_server_config(limits={"keep_alive_s": 0.005})
    server = FakeServer(FakeEngine(gate=asyncio.Event()), config=config)

    async with running(server, "/v1/chat/completions", CHAT | {"stream": True}) as connection:
        while not any(m.get("body") == b": keep-alive\n\n" for m in connection.sent):
            await asyncio.sleep(0.005)
        assert server.client.gate is not None
        server.client.gate.set()
        await connection.task

    assert connection.sent[-2]["body"] == b"data: [DONE]\n\n"
    assert server.client.closed == []


async def test_nothing_is_sent_before_the_first_token() -> None:
    engine = FakeEngine()
    released = asyncio.Event()
    original = engine.generate

    async def slow(request: Any) -> AsyncGenerator[Any, None]:
        await released.wait()
        async for output in original(request):
            yield output

    engine.generate = slow  # type: ignore[method-assign]
    connection = Connection(
        make_app(FakeServer(engine)), "/v1/chat/completions", CHAT | {"stream": True}
    )
    for _ in range(50):
        await asyncio.sleep(0)
    before = list(connection.sent)
    released.set()
    await connection.task

    assert before == []
    assert connection.sent[0]["status"] == 200


class Texts(ChunkWriter):
    def chunks(self, prompt: int, output: Output) -> list[Chunk]:
        return [{"text": output.text}]


async def test_a_client_that_takes_nothing_loses_its_stream() -> None:
    limits.apply(LimitsSection(stream_timeout_s=0.02))
    closed = asyncio.Event()
    refused: list[str] = []

    async def outputs() -> AsyncGenerator[tuple[int, Output], None]:
        try:
            while True:
                yield 0, Output(index=0, token_ids=(), text="1")
        finally:
            closed.set()

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def take_the_start_only(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    stream = EventStream(outputs(), Texts(), OPENAI, request_id="r", headers={})
    async with asyncio.timeout(10):
        scope = {"type": "http", "state": {"count_refusal": refused.append}}
        await stream(scope, never, take_the_start_only)

    assert closed.is_set()
    assert refused == ["stream_timeout_s"]


_SCOPE = {
    "type": "http",
    "method": "GET",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"",
    "headers": [],
}


@pytest.mark.parametrize(("begins", "logged"), [(True, 0), (False, 1)])
async def test_a_lost_connection_is_an_error_only_before_the_answer(
    begins: bool, logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[Message] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        if begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ConnectionResetError("closed")

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    edge = Edge(
        app,
        limits=LimitsSection,
        dialect_of=lambda _: OPENAI,
        echo_request_id=False,
        count=lambda _route, _status: None,
        count_refusal=lambda _: None,
    )
    with caplog.at_level(logging.ERROR):
        await edge(dict(_SCOPE), receive, send)

    assert len(caplog.records) == logged
    assert sent[0]["status"] == (200 if begins else 500)
