"""Responses, their events and items: as always, and of the types of the official client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import (
    Response,
    ResponseItem,
    ResponseStreamEvent,
)
from pydantic import BaseModel, TypeAdapter

from remora.configs.errors import EngineError
from tests.deployments.fakes import FakeEngine, FakeServer, make_client
from tests.deployments.http.golden import check_golden, parts_of
from tests.deployments.http.responses.test_response import (
    ADD,
    REASONING_AND_CALL,
    SCHEMA,
    make_parsing_server,
    post,
)

HERE = Path(__file__).parent
CUT = len(REASONING_AND_CALL.removesuffix("1}}\n</tool_call>"))
EVENT: TypeAdapter[BaseModel] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[BaseModel] = TypeAdapter(ResponseItem)
FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
CASES: dict[str, tuple[FakeServer, dict[str, Any]]] = {
    "text": (FakeServer(), {"temperature": 0.5, "stop": "x"}),
    "text_cut_off": (FakeServer(), {"max_output_tokens": 2}),
    "logprobs": (
        FakeServer(),
        {"top_logprobs": 2, "include": ["message.output_text.logprobs"], "max_output_tokens": 2},
    ),
    "told_back": (
        FakeServer(),
        {
            "instructions": "Be brief.",
            "metadata": {"k": "v"},
            "reasoning": {"summary": "auto"},
            "user": "u",
            "truncation": "disabled",
            "service_tier": "auto",
        },
    ),
    "reasoning_cut_off": (make_parsing_server("Paris."), {"max_output_tokens": 2}),
    "nothing": (make_parsing_server("<think>"), {}),
    "logprobs_after_reasoning": (make_parsing_server("a</think>b"), {"top_logprobs": 0}),
    "format": (make_parsing_server('x</think>{"a": 1}'), {"text": FORMAT}),
    "reasoning_and_call": (
        make_parsing_server(REASONING_AND_CALL),
        {"tools": [ADD], "tool_choice": "auto"},
    ),
    "call_cut_off": (
        make_parsing_server(REASONING_AND_CALL),
        {"tools": [ADD], "max_output_tokens": CUT},
    ),
    "named_tool": (
        make_parsing_server('x</think>{"a": 1}'),
        {"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}},
    ),
}


# The service sends `store` and `bytes`, though the types omit them; some versions of the client
# require a `name` in the last event of a call's arguments.
UNTYPED = {"store", "response.store", "name"}


def data_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, without the names of their frames."""
    return [data for event in parts_of(response)[1:] for data in event.values()]


def unknown_to(model: BaseModel, place: str = "") -> list[str]:
    """Return the fields, at any depth, that the client's types lack."""
    found = [f"{place}{name}" for name in model.model_extra or {}]
    for name, value in model:
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, BaseModel):
                found += unknown_to(part, f"{place}{name}.")
    return [name for name in found if name not in UNTYPED and not name.endswith("bytes")]


@pytest.mark.parametrize("name", CASES)
async def test_every_event_is_one_of_the_clients(name: str) -> None:
    server, fields = CASES[name]
    response = await post(server, **fields, stream=True)
    check_golden(HERE, f"{name}, streamed", response)
    events = data_of(response)

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        parsed = EVENT.validate_python(event)
        assert parsed.type == event["type"]  # type: ignore[attr-defined]
        assert unknown_to(parsed) == []


@pytest.mark.parametrize("name", CASES)
async def test_a_whole_response_is_the_clients(name: str) -> None:
    server, fields = CASES[name]
    response = await post(server, **fields)

    check_golden(HERE, name, response)
    assert unknown_to(Response.model_validate(response.json())) == []


@pytest.mark.parametrize("fail_at", [1, 4])
async def test_a_late_error_is_two_events_of_the_clients_and_nothing_is_stored(
    fail_at: int,
) -> None:
    server = FakeServer(FakeEngine(error=EngineError("secret"), fail_at=fail_at))
    async with make_client(server) as client:
        response = await client.post("/v1/responses", json={"input": "Hi", "stream": True})
        events = data_of(response)
        stored = await client.get(f"/v1/responses/{events[0]['response']['id']}")

    check_golden(HERE, f"late error {fail_at}", response)
    for event in events:
        assert unknown_to(EVENT.validate_python(event)) == []
    assert stored.status_code == 404


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
