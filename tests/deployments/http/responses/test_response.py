"""Responses of /v1/responses, the prompts they produce, and what is stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_config
from tests.deployments.http.streams import ask
from tests.moments import steps

ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
REASONING_AND_CALL = (
    "<think>\nHm.\n</think>\n\nLook:\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
)


def make_parsing_server(text: str, **api: Any) -> FakeServer:
    config = make_config(tool_parser="hermes", reasoning_parser="deepseek-r1", **api)
    return FakeServer(FakeEngine(text=text), config=config)


async def post(server: FakeServer | None = None, **body: Any) -> httpx.Response:
    return await ask("/v1/responses", server, **{"input": "Hi"} | body)


async def messages_of(**body: Any) -> Any:
    """Return the chat template's arguments for a body."""
    server = FakeServer()
    response = await post(server, **body)
    assert response.status_code == 200, response.text
    return server.tokenizer.rendered[-1]["messages"]


async def test_items_become_messages() -> None:
    messages = await messages_of(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "And kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                {"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "Look:", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "function_call_output", "call_id": "c2", "output": [
                {"type": "input_text", "text": "3"}]},
            {"role": "assistant", "content": "2"},
            {"role": "assistant", "content": "or 3"},
        ],
    )  # fmt: skip

    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "add", "arguments": {}}},
    ]
    assert messages == [
        {"role": "system", "content": "Be brief.\n\nAnd kind."},
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": "Look:",
            "reasoning_content": "Hm.",
            "tool_calls": calls,
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "tool", "content": "3", "tool_call_id": "c2"},
        {"role": "assistant", "content": "2\nor 3"},
    ]


async def test_reasoning_after_a_call_begins_another_turn() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "H"}],
    }

    messages = await messages_of(input=[{"role": "user", "content": "x"}, call, reasoning])

    assert [message["role"] for message in messages] == ["user", "assistant", "assistant"]
    assert messages[2] == {"role": "assistant", "content": "", "reasoning_content": "H"}


async def test_an_answer_sent_back_as_it_came_is_understood() -> None:
    output = (await post(make_parsing_server(REASONING_AND_CALL), tools=[ADD])).json()["output"]
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "2"}

    messages = await messages_of(input=[{"role": "user", "content": "x"}, *output, result])

    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["reasoning_content"] == "Hm."
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


async def test_a_response_continues_another() -> None:
    server = FakeServer()
    async with make_client(server) as client:
        first = await client.post(
            "/v1/responses", json={"input": "One", "instructions": "Be brief."}
        )
        body = {"input": "Two", "previous_response_id": first.json()["id"]}
        second = await client.post("/v1/responses", json=body)
        body = {"input": "Three", "previous_response_id": second.json()["id"], "stream": True}
        await client.post("/v1/responses", json=body)

    assert server.tokenizer.rendered[-1]["messages"] == [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "Three"},
    ]


async def continue_after(text: str, **body: Any) -> tuple[FakeServer, httpx.Response]:
    """Continue a response in which the model generated `text`."""
    server = make_parsing_server(text)
    async with make_client(server) as client:
        first = await client.post("/v1/responses", json={"input": "Hi", "tools": [ADD]} | body)
        body = {"input": "And?", "previous_response_id": first.json()["id"]}
        return server, await client.post("/v1/responses", json=body)


async def test_a_call_that_was_cut_off_is_not_carried_on() -> None:
    room = len(REASONING_AND_CALL.removesuffix("1}}\n</tool_call>"))
    server, response = await continue_after(REASONING_AND_CALL, max_output_tokens=room)

    assert response.status_code == 200
    roles = [message["role"] for message in server.tokenizer.rendered[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert "tool_calls" not in server.tokenizer.rendered[-1]["messages"][1]


async def test_a_call_of_a_tool_that_cannot_be_is_said_to_end_the_conversation() -> None:
    text = REASONING_AND_CALL.replace("add", "add me")
    _, response = await continue_after(text)

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "previous_response_id")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_can_be_read_and_deleted(stream: bool) -> None:
    async with make_client() as client:
        unstored = await client.post("/v1/responses", json={"input": "Hi", "store": False})
        unread = await client.get(f"/v1/responses/{unstored.json()['id']}")
        made = await client.post("/v1/responses", json={"input": "Hi", "stream": stream})
        id_ = made.text.split('"id":"', 1)[1].split('"', 1)[0]
        read = await client.get(f"/v1/responses/{id_}")
        cancelled = await client.post(f"/v1/responses/{id_}/cancel")
        deleted = await client.delete(f"/v1/responses/{id_}")
        gone = await client.get(f"/v1/responses/{id_}")

    assert (unstored.json()["store"], unread.status_code) == (False, 404)
    assert read.json()["status"] == "completed"
    assert read.json()["output"][0]["content"][0]["text"] == "Paris."
    assert cancelled.status_code == 400
    assert deleted.json() == {"id": id_, "object": "response", "deleted": True}
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")


async def test_input_items_come_in_pages() -> None:
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    async with make_client() as client:
        id_ = (await client.post("/v1/responses", json={"input": items})).json()["id"]
        path = f"/v1/responses/{id_}/input_items"
        newest = (await client.get(path, params={"limit": 2})).json()
        after = {"limit": 3, "after": newest["last_id"]}
        rest = (await client.get(path, params=after)).json()
        ordered = (await client.get(path, params={"order": "asc"})).json()
        faults = [
            (await client.get(path, params=params)).status_code
            for params in ({"limit": 0}, {"limit": 101}, {"order": "x"}, {"after": "x"})
        ]

    assert [item["content"][0]["text"] for item in newest["data"]] == ["4", "3"]
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]
    assert (newest["has_more"], rest["has_more"]) == (True, False)
    assert len(ordered["data"]) == 5
    assert faults == [400] * 4


async def test_an_unknown_response_is_not_found() -> None:
    async with make_client() as client:
        url = "/v1/responses/resp_x"
        found = [await client.get(url), await client.get(f"{url}/input_items")]
        found += [await client.post(f"{url}/cancel")]
        continued = {"input": "Hi", "previous_response_id": "resp_x"}
        found += [await client.post("/v1/responses", json=continued)]
    error = found[-1].json()["error"]
    assert [response.status_code for response in found] == [404, 404, 404, 400]
    assert error["param"] == "previous_response_id"
    assert error["code"] == "previous_response_not_found"


@pytest.mark.observes("api.response_store")
async def test_without_a_store_nothing_can_be_continued() -> None:
    server = FakeServer(config=make_config(response_store="none"))
    made = await post(server, store=True)
    refused = await post(server, previous_response_id="resp_x")

    error = refused.json()["error"]
    assert made.json()["store"] is False
    assert refused.status_code == 400
    assert (error["param"], error["code"]) == ("previous_response_id", "unsupported")


@asynccontextmanager
async def in_progress(
    client: httpx.AsyncClient, server: FakeServer
) -> AsyncGenerator[tuple[asyncio.Task[httpx.Response], str], None]:
    """Start a response; yield its task and its id once the engine works on it."""
    making = asyncio.create_task(client.post("/v1/responses", json={"input": "Hi"}))
    async with asyncio.timeout(10):
        while not server.client.running:
            await asyncio.sleep(0)
        await steps(50)
        (id_,) = {request.request_id.partition("#")[0] for request in server.client.requests}
        yield making, id_
        await making


async def test_a_running_response_can_be_read_and_cancelled() -> None:
    server = FakeServer(FakeEngine(gate=asyncio.Event()))
    async with make_client(server) as client, in_progress(client, server) as (making, id_):
        running = await client.get(f"/v1/responses/{id_}")
        cancelled = await client.post(f"/v1/responses/{id_}/cancel")
        made = await making
        read = await client.get(f"/v1/responses/{id_}")

    assert running.json()["status"] == "in_progress"
    assert cancelled.json()["status"] == "cancelled"
    assert made.json()["status"] == "cancelled"
    assert read.json()["output"][0]["content"][0]["text"] == "P"
