"""The events of a streamed response, their order, and the official client's parsing of them."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from remora.configs.errors import EngineError
from remora.deployments.http.endpoints import RESPONSES
from remora.deployments.http.generation import endpoint
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.responses.archive import Record, archive_of
from remora.deployments.http.responses.response import ResponseJob
from tests.deployments.connection import Connection
from tests.deployments.fakes import FakeEngine, FakeServer, client_of, make_app, make_client
from tests.deployments.http.openai.test_openai_client import openai_client
from tests.deployments.http.responses.test_response import (
    ADD,
    REASONING_AND_CALL,
    make_parsing_server,
)
from tests.deployments.http.streams import named_events, without_repeats

Event = dict[str, Any]
# Names of events, without their common prefix.
START = ["created", "in_progress"]
MESSAGE_START = ["output_item.added", "content_part.added"]
MESSAGE_END = ["output_text.done", "content_part.done", "output_item.done"]


async def stream(server: FakeServer | None = None, **body: Any) -> httpx.Response:
    async with make_client(server) as client:
        return await client.post("/v1/responses", json={"input": "Hi", "stream": True} | body)


def names_of(events: list[Event]) -> list[str]:
    return without_repeats([event["type"].removeprefix("response.") for event in events])


def without_ids(item: Event) -> Event:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


async def test_the_events_of_a_text() -> None:
    events = named_events(await stream())

    end = [*MESSAGE_END, "completed"]
    assert names_of(events) == [*START, *MESSAGE_START, "output_text.delta", *end]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event.get("delta", "") for event in events) == "Paris."
    text_done = next(event for event in events if event["type"].endswith("output_text.done"))
    assert text_done["text"] == "Paris."
    assert {event["item_id"] for event in events if "item_id" in event} == {
        events[-1]["response"]["output"][0]["id"]
    }


async def test_the_events_of_reasoning_text_and_call() -> None:
    server = make_parsing_server(REASONING_AND_CALL)
    events = named_events(await stream(server, tools=[ADD]))

    assert names_of(events) == [
        *START,
        *MESSAGE_START,
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *MESSAGE_START,
        "output_text.delta",
        *MESSAGE_END,
        "output_item.added",
        "function_call_arguments.delta",
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    indexes = [event["output_index"] for event in events if "output_index" in event]
    assert indexes == sorted(indexes)
    assert set(indexes) == {0, 1, 2}
    arguments = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
    assert "".join(arguments) == '{"a": 1}'


async def test_a_stream_ends_with_what_a_whole_answer_holds() -> None:
    server = make_parsing_server(REASONING_AND_CALL)
    body: dict[str, Any] = {"tools": [ADD], "top_logprobs": 1}

    streamed = named_events(await stream(server, **body))
    whole = (await stream(server, **body, stream=False)).json()

    done = [event["item"] for event in streamed if event["type"].endswith("item.done")]
    last = streamed[-1]["response"]
    assert done == last["output"]
    assert list(map(without_ids, last["output"])) == list(map(without_ids, whole["output"]))
    assert last["usage"] == whole["usage"]


async def test_a_stream_cut_by_the_limit_ends_incomplete() -> None:
    events = named_events(await stream(max_output_tokens=2))

    assert names_of(events)[-2:] == ["output_item.done", "incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_a_call_cut_by_the_limit_is_incomplete() -> None:
    text = REASONING_AND_CALL.removesuffix("1}}\n</tool_call>")
    server = make_parsing_server(REASONING_AND_CALL)
    events = named_events(await stream(server, tools=[ADD], max_output_tokens=len(text)))

    call = events[-1]["response"]["output"][-1]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")
    assert '{"a": 1}'.startswith(call["arguments"])


async def test_an_answer_of_nothing_is_an_empty_message() -> None:
    server = make_parsing_server("<think>")
    events = named_events(await stream(server))

    assert names_of(events) == [*START, *MESSAGE_START, *MESSAGE_END, "completed"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_an_error_after_the_first_token_is_a_failed_response_and_an_error() -> None:
    server = FakeServer(FakeEngine(error=EngineError("secret"), fail_at=2))
    async with make_client(server) as client:
        response = await client.post("/v1/responses", json={"input": "Hi", "stream": True})
        events = named_events(response)
        stored = await client.get(f"/v1/responses/{events[0]['response']['id']}")

    assert names_of(events) == [*START, *MESSAGE_START, "output_text.delta", "failed", "error"]
    assert events[-2]["response"]["status"] == "failed"
    assert events[-2]["response"]["error"]["code"] == "server_error"
    assert events[-1]["code"] == "engine_failed"
    assert "secret" not in response.text
    assert stored.status_code == 404  # a failed response is not stored


class City(BaseModel):
    """The structured output of the model."""

    name: str


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


@pytest.mark.parametrize("streams", [True, False])
async def test_the_client_parses_what_it_asked_for(streams: bool) -> None:
    server = FakeServer(FakeEngine(text='{"name": "Paris"}'))
    async with openai_client(server) as client:
        if streams:
            async with client.responses.stream(
                model="tiny", input="Hi", text_format=City
            ) as stream:
                answer = await stream.get_final_response()
        else:
            answer = await client.responses.parse(model="tiny", input="Hi", text_format=City)

    assert answer.output_parsed == City(name="Paris")
    ((constraint, _),) = server.grammars.asked
    assert "name" in constraint.source


async def test_a_response_that_nobody_waits_for_is_not_running() -> None:
    server = ServerState.over(FakeServer(FakeEngine(gate=asyncio.Event())))
    job, _ = await RESPONSES.job(server, {"input": "Hi", "stream": True}, "r1")

    async with aclosing(endpoint.stream(server, job)) as events:
        created = await anext(events)
        id_ = created["response"]["id"]
        while_it_runs = archive_of(server).running(id_)

    assert while_it_runs is not None
    assert archive_of(server).running(id_) is None


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
    job, _ = await RESPONSES.job(server, {"input": "Hi", "stream": True}, "r1")
    stored: list[Record] = []

    async def keep(record: Record) -> None:
        stored.append(record)

    assert isinstance(job, ResponseJob)
    job.archive.keep = keep  # type: ignore[method-assign]
    names: list[tuple[str, int]] = []
    writer = job.writer()
    writer.begin()
    async with aclosing(await server.calls.open(job.rid, job.requests)) as outputs:
        async for prompt, output in outputs:
            names += [(chunk["type"], len(stored)) for chunk in writer.chunks(prompt, output)]
    names += [(chunk["type"], len(stored)) for chunk in await writer.end()]

    assert names[-4:] == [
        *((f"response.{name}", 0) for name in MESSAGE_END),
        ("response.completed", 1),
    ]
