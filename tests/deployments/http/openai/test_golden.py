"""Complete streams of /v1/chat/completions, event by event, unchanged over time.

The expected events are in `golden/`; ids, times and the model's name come from the fake engine. A
change there is a change for every client.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.configs.errors import EngineError
from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_config

PATH = "/v1/chat/completions"
GOLDEN = Path(__file__).parent / "golden"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALLS = (
    'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
)
USAGE = {"stream_options": {"include_usage": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Paris.", {}),
    "text_of_two": ("Yes", {"n": 2}),
    "usage": ("Yes", USAGE),
    "length": ("Paris.", {"max_tokens": 2} | USAGE),
    "reasoning": ("<think>\n2+2\n</think>\n\n4", USAGE),
    "reasoning_in_one_piece": ("<think>2+2</think>4", {"stream_reasoning": False}),
    "reasoning_left_out": ("<think>2+2</think>4", {"include_reasoning": False}),
    "reasoning_cut_off": ("<think>2+2</think>4", {"max_tokens": 9} | USAGE),
    "tools": (CALLS, {"tools": [ADD]} | USAGE),
    "tools_cut_off": (CALLS, {"tools": [ADD], "max_tokens": 55}),
    "reasoning_and_tools": (f"<think>x</think>{CALLS}", {"tools": [ADD], "n": 2} | USAGE),
    "named_tool": (
        'x</think>{"a": 1}',  # with a grammar, the output begins inside reasoning
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
    ),
    "required_tools": (
        'x</think>[{"name": "add", "parameters": {"a": 1}}]',
        {"tools": [ADD], "tool_choice": "required"},
    ),
}


def make_server(**engine: Any) -> FakeServer:
    config = make_config(tool_parser="hermes", reasoning_parser="qwen3")
    return FakeServer(FakeEngine(**engine), config=config)


async def stream(server: FakeServer, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True} | fields
    async with make_client(server) as client:
        return await client.post(PATH, json=body, headers={"x-request-id": "r1"})


def events_of(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    events = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    return [json.loads(event) if event.startswith("{") else event for event in events]


def normal(events: list[Any]) -> list[Any]:
    """Replace values that differ between runs; ids of calls become their numbers."""
    call_ids: dict[str, str] = {}
    for event in events:
        if isinstance(event, dict) and "created" in event:
            event["created"] = 0
        for choice in event.get("choices", ()) if isinstance(event, dict) else ():
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    call["id"] = call_ids.setdefault(call["id"], f"call-{len(call_ids)}")
    return events


def golden(name: str) -> list[Any]:
    return [json.loads(line) for line in (GOLDEN / f"{name}.jsonl").read_text("utf-8").splitlines()]


def check(name: str, events: list[Any]) -> None:
    assert normal(events) == golden(name)


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_is_as_it_has_always_been(name: str) -> None:
    text, fields = CASES[name]

    response = await stream(make_server(text=text), **fields)

    assert response.status_code == 200
    check(name, events_of(response.text))


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"reasoning_left_out"}))
async def test_a_streams_pieces_add_up_to_the_answer_in_one_piece(name: str) -> None:
    text, fields = CASES[name]
    plain = {key: value for key, value in fields.items() if key != "stream_options"}

    streamed = events_of((await stream(make_server(text=text), **fields)).text)
    whole = (await stream(make_server(text=text), **plain, stream=False)).json()

    for choice in whole["choices"]:
        own = [
            piece
            for event in streamed[:-1]
            for piece in event["choices"]
            if piece["index"] == choice["index"]
        ]
        deltas = [piece["delta"] for piece in own]
        message = choice["message"]
        assert "".join(d.get("content") or "" for d in deltas) == (message["content"] or "")
        assert "".join(d.get("reasoning", "") for d in deltas) == message.get("reasoning", "")
        calls = [call for d in deltas for call in d.get("tool_calls", ())]
        for number, call in enumerate(message.get("tool_calls", ())):
            pieces = [c["function"] for c in calls if c["index"] == number]
            assert [piece["name"] for piece in pieces if "name" in piece] == ["add"]
            joined = "".join(piece["arguments"] for piece in pieces)
            assert joined == call["function"]["arguments"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert all(piece["finish_reason"] is None for piece in own[:-1])
    if "stream_options" in fields:
        assert streamed[-2]["usage"] == whole["usage"]


async def test_an_error_after_the_first_token_is_an_event_and_then_the_end() -> None:
    response = await stream(make_server(text="Paris.", error=EngineError("x"), fail_at=2))

    assert response.status_code == 200
    check("late_error", events_of(response.text))
