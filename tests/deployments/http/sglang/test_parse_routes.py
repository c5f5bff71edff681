"""The parser routes over HTTP."""

from __future__ import annotations

import pytest

from remora.deployments.http.sglang.parse_routes import MAX_PARSED_CHARS
from tests.deployments.fakes import FakeServer, make_config
from tests.deployments.http.streams import ask

CALLS, REASONING = "/parse_function_call", "/separate_reasoning"
ADD = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


async def test_calls_are_told_from_text() -> None:
    response = await ask(CALLS, text=f"Hm. {CALL}", tools=[ADD], tool_call_parser="qwen25")

    answer = response.json()
    assert answer["normal_text"].strip() == "Hm."
    assert answer["calls"] == [{"tool_index": 0, "name": "add", "parameters": '{"a": 1}'}]


async def test_a_text_without_calls_stays_as_it_is() -> None:
    response = await ask(CALLS, text="Hm. {", tools=[ADD], tool_call_parser="qwen25")
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
    response = await ask(REASONING, text=text, reasoning_parser="deepseek-r1")
    assert response.json() == {"reasoning_text": reasoning, "text": answer}


async def test_without_a_name_the_models_own_format_is_used() -> None:
    server = FakeServer(config=make_config(tool_parser="hermes", reasoning_parser="qwen3"))

    calls = await ask(CALLS, server, text=CALL, tools=[ADD])
    reasoning = await ask(REASONING, server, text="<think>x</think>y")

    assert calls.json()["calls"][0]["name"] == "add"
    assert reasoning.json() == {"reasoning_text": "x", "text": "y"}


async def test_texts_have_a_limit() -> None:
    longest = await ask(REASONING, text="x" * MAX_PARSED_CHARS, reasoning_parser="qwen3")
    too_long = await ask(REASONING, text="x" * (MAX_PARSED_CHARS + 1), reasoning_parser="qwen3")

    assert len(longest.json()["text"]) == MAX_PARSED_CHARS
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "text")
