"""The events of a streamed response, their order, and the official client's parsing of them."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing

import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from remora.deployments.http.endpoints import RESPONSES
from remora.deployments.http.generation import endpoint
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.responses.archive import Record, archive_of
from remora.deployments.http.responses.response import ResponseJob
from tests.deployments.connection import Connection
from tests.deployments.fakes import FakeEngine, FakeServer, client_of, make_app
from tests.deployments.http.openai.test_openai_client import openai_client
from tests.deployments.http.responses.test_response import (
    ADD,
    REASONING_AND_CALL,
    make_parsing_server,
)

CONTEXT = RequestContext(request_id="r1")


async def test_the_client_reads_a_response_and_continues_it() -> None:
    async with openai_client(FakeServer()) as client:
        first = await client.responses.create(model="tiny", input="Hi")
        second = await client.responses.create(
            model="tiny", input="And?", previous_response_id=first.id
        )
        read_again = await client.responses.retrieve(second.id)
        items = await client.responses.input_items.list(second.id)
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)

    assert first.output_text == second.output_text == "Paris."
    assert read_again.output_text == "Paris."
    assert items.data[0].type == "message"


async def test_the_client_streams_text_and_calls() -> None:
    server = make_parsing_server(REASONING_AND_CALL)
    async with (
        openai_client(server) as client,
        client.responses.stream(
            model="tiny",
            input="Hi",
            tools=[{**ADD, "strict": True}],  # type: ignore[list-item]
        ) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()

    assert kinds[-1] == "response.completed"
    assert final.output_text.startswith("Look:")
    (call,) = [item for item in final.output if item.type == "function_call"]
    assert call.parsed_arguments == {"a": 1}


async def test_a_response_that_nobody_waits_for_is_not_running() -> None:
    server = ServerState.over(FakeServer(FakeEngine(gate=asyncio.Event())))
    job, _ = await RESPONSES.job(server, {"input": "Hi", "stream": True}, CONTEXT)

    async with aclosing(endpoint.stream(server, job)) as events:
        created = await anext(events)
        id_ = created["response"]["id"]
        while_it_runs = archive_of(server, CONTEXT).running(id_)

    assert while_it_runs is not None
    assert archive_of(server, CONTEXT).running(id_) is None


async def test_a_response_is_not_running_once_its_client_sees_the_end() -> None:
    app = make_app()
    read: list[str] = []
    ids: list[str] = []

    async def read_at_the_end(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_read(message: Message) -> None:
            body = message.get("body", b"")
            ids.extend(re.findall(r'"id":"(resp_[0-9a-f]+)"', body.decode()))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                async with client_of(app) as client:
                    response = await client.get(f"/v1/responses/{ids[0]}")
                read.append(response.json()["status"])
            await send(message)

        await app(scope, receive, send_and_read)

    connection = Connection(read_at_the_end, "/v1/responses", {"input": "Hi", "stream": True})
    await connection.task

    assert read == ["completed"]


async def test_items_end_before_the_response_is_stored() -> None:
    server = ServerState.over(FakeServer())
    job, _ = await RESPONSES.job(server, {"input": "Hi", "stream": True}, CONTEXT)
    stored: list[Record] = []

    async def keep(record: Record) -> None:
        stored.append(record)

    assert isinstance(job, ResponseJob)
    job.archive.keep = keep  # type: ignore[method-assign]
    names: list[tuple[str, int]] = []
    writer = job.writer()
    writer.begin()
    async with aclosing(await server.calls.open(job.context, job.requests)) as outputs:
        async for prompt, output in outputs:
            names += [(chunk["type"], len(stored)) for chunk in writer.chunks(prompt, output)]
    names += [(chunk["type"], len(stored)) for chunk in await writer.end()]

    assert [stored for _, stored in names[-4:]] == [0, 0, 0, 1]
    assert names[-1][0] == "response.completed"
