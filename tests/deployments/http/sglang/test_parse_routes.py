"""The parser routes over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from remora.deployments.http.sglang.parse_routes import MAX_PARSED_CHARS
from tests.deployments.fakes import FakeServer, make_client, make_config

CALLS, REASONING = "/parse_function_call", "/separate_reasoning"
ADD = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


async def post(path: str, server: FakeServer | None = None, **body: Any) -> httpx.Response:
    async with make_client(server) as client:
        return await client.post(path, json=body)


async def test_calls_are_told_from_text() -> None:
    response = await post(CALLS, text=f"Hm. {CALL}", tools=[ADD], tool_call_parser="qwen25")

    answer = response.json()
    assert answer["normal_text"].strip() == "Hm."
    assert answer["calls"] == [{"tool_index": 0, "name": "add", "parameters": '{"a": 1}'}]


async def test_a_text_without_calls_stays_as_it_is() -> None:
    response = await post(CALLS, text="Hm. {", tools=[ADD], tool_call_parser="qwen25")
    assert response.json() == {"normal_text": "Hm. {", "calls": []}


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>2+2</think>4", "2+2", "4"),
        ("2+2</think>4", "2+2", "4"),
        ("2+2", "2+2", ""),
    ],
)
async def test_reasoning_is_told_from_the_answer(text: str, reasoning: str, answer: str) -> None:
    response = await post(REASONING, text=text, reasoning_parser="deepseek-r1")
    assert response.json() == {"reasoning_text": reasoning, "text": answer}


async def test_without_a_name_the_models_own_format_is_used() -> None:
    server = FakeServer(config=make_config(tool_parser="hermes", reasoning_parser="qwen3"))

    calls = await post(CALLS, server, text=CALL, tools=[ADD])
    reasoning = await post(REASONING, server, text="<think>x</think>y")

    assert calls.json()["calls"][0]["name"] == "add"
    assert reasoning.json() == {"reasoning_text": "x", "text": "y"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CALLS, {"text": "x", "tools": [ADD]}, "tool_call_parser"),
        (CALLS, {"text": "x", "tools": [ADD], "tool_call_parser": "nope"}, "tool_call_parser"),
        (CALLS, {"text": "x", "tool_call_parser": "hermes"}, "tools"),
        (CALLS, {"text": "x", "tools": [], "tool_call_parser": "hermes"}, "tools"),
        (CALLS, {"tools": [ADD], "tool_call_parser": "hermes"}, "text"),
        (REASONING, {"text": "x"}, "reasoning_parser"),
        (REASONING, {"text": "x", "reasoning_parser": "nope"}, "reasoning_parser"),
        (REASONING, {"text": 1, "reasoning_parser": "qwen3"}, "text"),
    ],
)
async def test_faults_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    response = await post(path, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_texts_have_a_limit() -> None:
    longest = await post(REASONING, text="x" * MAX_PARSED_CHARS, reasoning_parser="qwen3")
    too_long = await post(REASONING, text="x" * (MAX_PARSED_CHARS + 1), reasoning_parser="qwen3")

    assert len(longest.json()["text"]) == MAX_PARSED_CHARS
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "text")
