"""Responses, their events and their items, compared with the types of the official client."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import (
    Response,
    ResponseItem,
    ResponseStreamEvent,
)
from pydantic import BaseModel, TypeAdapter

from remora.configs.errors import EngineError
from tests.deployments.fakes import FakeEngine, FakeServer, make_client
from tests.deployments.http.responses.test_events import stream
from tests.deployments.http.responses.test_response import (
    ADD,
    REASONING_AND_CALL,
    SCHEMA,
    make_parsing_server,
)
from tests.deployments.http.streams import named_events

EVENT: TypeAdapter[BaseModel] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[BaseModel] = TypeAdapter(ResponseItem)
FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Paris.", {}),
    "cut_off": ("Paris.", {"max_output_tokens": 2}),
    "logprobs": ("Paris.", {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}),
    "format": ('x</think>{"a": 1}', {"text": FORMAT}),
    "reasoning_and_call": (REASONING_AND_CALL, {"tools": [ADD], "tool_choice": "auto"}),
    "named_tool": (
        'x</think>{"a": 1}',
        {"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}},
    ),
    "told_back": (
        "Paris.",
        {
            "instructions": "Be brief.",
            "metadata": {"k": "v"},
            "reasoning": {"summary": "auto"},
            "user": "u",
            "truncation": "disabled",
            "service_tier": "auto",
        },
    ),
}


# The service sends the former, though the types omit it; some versions of the client require a
# `name` in the last event of a call's arguments.
UNTYPED = {"store", "response.store", "name"}


def unknown_to(model: BaseModel, place: str = "") -> list[str]:
    """Return the fields, at any depth, that the client's types lack."""
    found = [f"{place}{name}" for name in model.model_extra or {}]
    for name, value in model:
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, BaseModel):
                found += unknown_to(part, f"{place}{name}.")
    return [name for name in found if name not in UNTYPED]


@pytest.mark.parametrize("name", CASES)
async def test_every_event_is_one_of_the_clients(name: str) -> None:
    text, fields = CASES[name]
    events = named_events(await stream(make_parsing_server(text), **fields))

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        parsed = EVENT.validate_python(event)
        assert parsed.type == event["type"]  # type: ignore[attr-defined]
        assert unknown_to(parsed) == []


@pytest.mark.parametrize("name", CASES)
async def test_a_whole_response_is_the_clients(name: str) -> None:
    text, fields = CASES[name]
    response = await stream(make_parsing_server(text), **fields, stream=False)

    assert unknown_to(Response.model_validate(response.json())) == []


@pytest.mark.parametrize("fail_at", [1, 4])
async def test_a_late_error_is_two_events_of_the_clients(fail_at: int) -> None:
    server = FakeServer(FakeEngine(error=EngineError("m"), fail_at=fail_at))
    events = named_events(await stream(server))

    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert unknown_to(EVENT.validate_python(event)) == []


async def test_the_items_of_an_input_are_the_clients() -> None:
    items = [
        {"role": "user", "content": "1 + 1?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "H"}]},
        {"role": "assistant", "content": "Look:"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"role": "system", "content": "Be brief."},
    ]
    async with make_client() as client:
        made = await client.post("/v1/responses", json={"input": items})
        listed = (await client.get(f"/v1/responses/{made.json()['id']}/input_items")).json()

    assert len(listed["data"]) == len(items)
    for item in listed["data"]:
        assert unknown_to(ITEM.validate_python(item)) == []
