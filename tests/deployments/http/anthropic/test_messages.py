"""Responses of /v1/messages, whole and streamed, and the prompts they produce."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.configs.errors import EngineError
from tests.deployments.fakes import (
    CharTokenizer,
    FakeEngine,
    FakeServer,
    make_client,
    make_config,
    make_plan,
    make_server_config,
)
from tests.deployments.http.core.test_disconnect import running
from tests.deployments.http.golden import check_golden
from tests.deployments.http.responses.test_response import REASONING_AND_CALL, make_parsing_server
from tests.deployments.http.streams import prompt_of

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


async def post(server: FakeServer | None = None, path: str = "", **body: Any) -> httpx.Response:
    headers = {"x-request-id": "r1", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    fields = {"messages": HELLO} | ({} if path else {"max_tokens": 500}) | body
    async with make_client(server) as client:
        return await client.post(f"/v1/messages{path}", json=fields, headers=headers)


async def messages_of(**body: Any) -> Any:
    """Return the chat template's arguments for a body."""
    server = FakeServer()
    response = await post(server, **body)
    assert response.status_code == 200, response.text
    return server.tokenizer.rendered[-1]["messages"]


HERE = Path(__file__).parent
CUT = len(REASONING_AND_CALL.removesuffix("1}}\n</tool_call>"))
CASES: dict[str, tuple[FakeServer, dict[str, Any]]] = {
    "text": (FakeServer(), {}),
    "limit": (FakeServer(), {"max_tokens": 2}),
    "stop text": (FakeServer(FakeEngine(stopped_by="x")), {"stop_sequences": ["x"]}),
    "stop token": (FakeServer(FakeEngine(stopped_by=46)), {}),
    "reasoning, text and call": (make_parsing_server(REASONING_AND_CALL), {"tools": [ADD]}),
    "call that is cut off": (
        make_parsing_server(REASONING_AND_CALL),
        {"tools": [ADD], "max_tokens": CUT},
    ),
    "nothing": (make_parsing_server("<think>"), {}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CASES)
async def test_a_reply_is_as_it_has_always_been(name: str, stream: bool) -> None:
    server, fields = CASES[name]
    response = await post(server, **fields, stream=stream)
    check_golden(HERE, f"{name}, streamed" if stream else name, response)


async def test_an_error_after_the_first_token_is_the_last_event() -> None:
    server = FakeServer(FakeEngine(error=EngineError("secret"), fail_at=2))
    check_golden(HERE, "late error", await post(server, stream=True))


async def test_blocks_become_messages() -> None:
    messages = await messages_of(
        system=[{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "B"}],
        messages=[
            {"role": "user", "content": "One"},
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "Look:"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "c2", "name": "add", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
                {"type": "tool_result", "tool_use_id": "c2", "is_error": True,
                 "content": [{"type": "text", "text": "no a"}]},
                {"type": "text", "text": "And?"}]},
        ],
    )  # fmt: skip

    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "add", "arguments": {}}},
    ]
    assert messages == [
        {"role": "system", "content": "A\nB"},
        {"role": "user", "content": "One\ntwo"},
        {
            "role": "assistant",
            "content": "Look:",
            "reasoning_content": "Hm.",
            "tool_calls": calls,
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "tool", "content": "Error: no a", "tool_call_id": "c2"},
        {"role": "user", "content": "And?"},
    ]


async def test_an_answer_sent_back_as_it_came_is_understood() -> None:
    answer = (await post(make_parsing_server(REASONING_AND_CALL), tools=[ADD])).json()
    result = {"type": "tool_result", "tool_use_id": answer["content"][2]["id"], "content": "2"}

    turns = [*HELLO, {"role": "assistant", "content": answer["content"]}]
    messages = await messages_of(messages=[*turns, {"role": "user", "content": [result]}])

    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


async def test_an_answer_that_is_begun_goes_on() -> None:
    server = FakeServer()
    await post(server, messages=[*HELLO, {"role": "assistant", "content": "The "}])
    assert prompt_of(server).endswith("<|assistant|>The ")


async def test_names_of_tools_may_be_as_long_as_anthropics() -> None:
    name = "n" * 128
    use = {"type": "tool_use", "id": "t1", "name": name, "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "3"}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]

    response = await post(
        make_parsing_server("x"),
        messages=[*HELLO, *turns],
        tools=[ADD | {"name": name}],
        tool_choice={"type": "tool", "name": name},
    )

    assert response.status_code == 200


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "add", "disable_parallel_tool_use": True}, True),
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
    ],
)
async def test_a_choice_of_tools_is_held_to(choice: Any, is_forced: bool) -> None:
    server = make_parsing_server("x")
    response = await post(server, tools=[ADD], tool_choice=choice)

    assert response.status_code == 200
    assert bool(server.grammars.asked) is is_forced
    assert bool(server.tokenizer.rendered[0]["tools"]) is (choice["type"] != "none")


FORMAT = {"type": "json_schema", "schema": ADD["input_schema"]}


@pytest.mark.parametrize(
    ("fields", "grammar", "named"),
    [
        ({"output_format": FORMAT, "output_config": {"format": FORMAT}}, {}, "output_format"),
        ({"output_format": FORMAT, "tools": [ADD]}, {"backend": "outlines"}, "output_format"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 100}},
            {},
            "thinking.budget_tokens",
        ),
    ],
)
async def test_what_cannot_be_served_is_named_as_it_was_sent(
    fields: dict[str, Any], grammar: dict[str, Any], named: str
) -> None:
    config = make_server_config(api={"tool_parser": "hermes"}, grammar=grammar)
    response = await post(FakeServer(config=config), **fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(named)


async def test_thinking_is_switched_and_limited() -> None:
    server = make_parsing_server("<think>a</think>b")
    server.tokenizer = CharTokenizer("enable_thinking")
    await post(server, thinking={"type": "enabled", "budget_tokens": 100})
    await post(server, thinking={"type": "disabled"})

    assert [seen["enable_thinking"] for seen in server.tokenizer.rendered] == [True, False]
    assert server.client.requests[0].reasoning is not None
    assert server.client.requests[0].reasoning.budget == 100


@pytest.mark.parametrize("variables", [(), ("reasoning_effort",)])
async def test_an_effort_is_told_to_templates_that_know_it(variables: tuple[str, ...]) -> None:
    server = FakeServer(tokenizer=CharTokenizer(*variables))
    response = await post(server, output_config={"effort": "low"})

    assert response.status_code == 200
    effort = server.tokenizer.rendered[0].get("reasoning_effort")
    assert effort == ("low" if variables else None)


async def test_signs_of_life_are_pings() -> None:
    config = make_server_config(limits={"keep_alive_s": 0.01})
    server = FakeServer(FakeEngine(gate=asyncio.Event()), config=config)
    body = {"messages": HELLO, "max_tokens": 5, "stream": True}
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    async with running(server, "/v1/messages", body) as connection:
        while not any(message.get("body") == ping for message in connection.sent):
            await asyncio.sleep(0.005)
        assert server.client.gate is not None
        server.client.gate.set()
        await connection.task

    assert b"event: message_stop" in connection.sent[-2]["body"]


async def test_counted_tokens_are_those_of_a_messages_prompt_even_beyond_the_context() -> None:
    server = make_parsing_server("x")
    body: dict[str, Any] = {"system": "Be brief.", "tools": [ADD]}
    counted = (await post(server, "/count_tokens", **body)).json()
    usage = (await post(server, **body)).json()["usage"]
    long = await post(FakeServer(plan=make_plan(max_model_len=10)), "/count_tokens")

    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert long.json() == {"input_tokens": 23}


@pytest.mark.parametrize("path", ["", "/count_tokens"])
async def test_ignored_fields_are_reported(path: str) -> None:
    ignored = await post(None, path, temprature=1)
    strict = FakeServer(config=make_config(unknown_fields="reject"))
    refused = await post(strict, path, temprature=1)

    assert ignored.headers["x-remora-ignored-fields"] == "temprature"
    assert refused.status_code == 400
