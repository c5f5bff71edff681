"""A constraint together with tools, end to end on random weights."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import TinyCheckpoints
from tests.deployments.pooling_replica import running

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
ANSWERS = [{"c": "x"}, {"c": "y"}]
BODY = {
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [TOOL],
    "parallel_tool_calls": False,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"enum": ANSWERS}},
    },
    "n": 16,
    "seed": 1,
    "max_tokens": 180,
}


def kind_of(choice: dict[str, Any]) -> str:
    """Return the kind of a reply, after checking its content."""
    message = choice["message"]
    if choice["finish_reason"] == "tool_calls":
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) in ({"a": 1}, {"a": 2})
        assert message["content"] is None
        return "call"
    assert choice["finish_reason"] == "stop"
    assert json.loads(message["content"]) in ANSWERS
    return "answer"


@pytest.mark.timeout(120)
async def test_a_random_model_calls_a_tool_or_follows_the_schema(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    engine, api = {"kv_tokens": 16384}, {"tool_parser": "hermes"}
    async with running(tiny_checkpoints("llama"), engine=engine, api=api) as (client, _):
        response = await client.post("/v1/chat/completions", json=BODY)

    assert response.status_code == 200, response.text
    assert {kind_of(choice) for choice in response.json()["choices"]} == {"call", "answer"}
