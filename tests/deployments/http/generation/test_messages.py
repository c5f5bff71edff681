"""Messages of clients as chat templates receive them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from remora.deployments.http.core.body_limits import DEFAULTS
from remora.deployments.http.core.fields import parse
from remora.deployments.http.generation.messages import MAX_CALLS, Message
from tests.deployments.fakes import CharTokenizer, FakeServer
from tests.deployments.http.streams import ask

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


async def post(server: FakeServer, *messages: dict[str, Any]) -> httpx.Response:
    return await ask("/v1/chat/completions", server, messages=list(messages))


NO_ARGUMENTS: tuple[Any, ...] = ("", " ", "{}", {})
ADDED = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        # Arguments are JSON text for clients and objects for templates.
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"content": None, "tool_calls": [CALL | {"function": ADDED}]},
        ),
        *(
            (
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": no}}]},
                {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
            )
            for no in NO_ARGUMENTS
        ),
        *(
            (
                {"role": "tool", "content": content, "tool_call_id": "c1"},
                {"role": "tool", "content": "3", "tool_call_id": "c1"},
            )
            for content in ("3", [{"type": "text", "text": "3"}])
        ),
        # Functions of the old way are tools.
        (
            {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}},
            {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]},
        ),
        (
            {"role": "function", "name": "add", "content": "3"},
            {"role": "tool", "name": "add", "content": "3"},
        ),
        *(
            ({"role": "assistant", "content": "4", name: "2 + 2"}, {"reasoning_content": "2 + 2"})
            for name in ("reasoning", "reasoning_content")
        ),
        # A refusal stands for the content that it replaces.
        ({"role": "assistant", "content": None, "refusal": "No."}, {"content": "No."}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"content": "No."},
        ),
    ],
)
def test_a_message_becomes_one_of_the_template(
    sent: dict[str, Any], wanted: dict[str, Any]
) -> None:
    message = parse(Message, sent).as_template_message()

    if sent["role"] != "assistant":
        assert message == wanted
    assert {name: message[name] for name in wanted} == wanted


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
