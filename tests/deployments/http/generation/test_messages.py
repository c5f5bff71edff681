"""Messages of clients as chat templates receive them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from remora.deployments.http.core.body_limits import DEFAULTS
from remora.deployments.http.core.fields import parse
from remora.deployments.http.generation.messages import MAX_CALLS, Message
from tests.deployments.fakes import CharTokenizer, FakeServer, make_client

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def template_message(**fields: Any) -> dict[str, Any]:
    return parse(Message, fields).as_template_message()


async def post(server: FakeServer, *messages: dict[str, Any]) -> httpx.Response:
    async with make_client(server) as client:
        return await client.post("/v1/chat/completions", json={"messages": list(messages)})


def test_arguments_are_json_text_for_clients_and_objects_for_templates() -> None:
    message = template_message(role="assistant", content=None, tool_calls=[CALL])

    assert message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert message["content"] is None


@pytest.mark.parametrize("arguments", ["", " ", "{}", {}])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    call = {"function": {"name": "now", "arguments": arguments}}

    message = template_message(role="assistant", tool_calls=[call])

    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("content", ["3", [{"type": "text", "text": "3"}]])
def test_a_tools_result_names_its_call(content: Any) -> None:
    message = template_message(role="tool", content=content, tool_call_id="c1")

    assert message == {"role": "tool", "content": "3", "tool_call_id": "c1"}


def test_functions_of_the_old_way_are_tools() -> None:
    called = template_message(role="assistant", function_call={"name": "add", "arguments": "{}"})
    result = template_message(role="function", name="add", content="3")

    assert called["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {}}}
    ]
    assert result == {"role": "tool", "name": "add", "content": "3"}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_comes_back_under_either_name(name: str) -> None:
    message = template_message(role="assistant", content="4", **{name: "2 and 2"})

    assert message["reasoning_content"] == "2 and 2"


def test_a_refusal_stands_for_the_content_it_replaces() -> None:
    part = {"type": "refusal", "refusal": "No."}

    assert template_message(role="assistant", content=None, refusal="No.")["content"] == "No."
    assert template_message(role="assistant", content=[part])["content"] == "No."


async def test_an_answer_can_be_sent_back_as_it_came() -> None:
    server = FakeServer()
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning": "hm",
        "reasoning_content": "hm",
        "tool_calls": [CALL | {"index": 0}],
    }
    result = {"role": "tool", "content": "3", "tool_call_id": "c1"}

    response = await post(server, {"role": "user", "content": "1+2?"}, answer, result)

    assert response.status_code == 200, response.text
    assert "x-remora-ignored-fields" not in response.headers
    assert isinstance(server.tokenizer, CharTokenizer)
    rendered = server.tokenizer.rendered[0]["messages"]
    assert [message["role"] for message in rendered] == ["user", "assistant", "tool"]


async def test_limits_of_a_message_are_taken_and_one_more_is_refused() -> None:
    part = {"type": "text", "text": ""}
    for taken, message in (
        (True, {"role": "user", "content": [part] * DEFAULTS.max_parts}),
        (False, {"role": "user", "content": [part] * (DEFAULTS.max_parts + 1)}),
        (True, {"role": "assistant", "tool_calls": [CALL] * MAX_CALLS}),
        (False, {"role": "assistant", "tool_calls": [CALL] * (MAX_CALLS + 1)}),
    ):
        response = await post(FakeServer(), message)
        code = response.json().get("error", {}).get("code")
        assert (code != "invalid_value") is taken, response.text


async def test_arguments_nested_too_deep_are_refused() -> None:
    deep = '{"a":' * 65 + "1" + "}" * 65
    call = {"function": {"name": "f", "arguments": deep}}

    response = await post(FakeServer(), {"role": "assistant", "tool_calls": [call]})

    error = response.json()["error"]
    assert error["param"] == "messages[0].tool_calls[0].function.arguments"
