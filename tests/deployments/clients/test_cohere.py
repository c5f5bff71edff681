"""Cohere's client, on /v2/chat."""

from __future__ import annotations

import json
from typing import Any

import cohere
import pytest

pytestmark = pytest.mark.ray

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def client(server_url: str) -> cohere.ClientV2:
    return cohere.ClientV2(api_key="any", base_url=server_url)


def test_a_chat(client: cohere.ClientV2, model: str) -> None:
    answer = client.chat(model=model, messages=FRANCE, temperature=0, max_tokens=16, logprobs=True)

    assert "Paris" in answer.message.content[0].text
    assert answer.finish_reason in ("COMPLETE", "MAX_TOKENS")
    assert answer.usage.tokens.output_tokens > 0
    assert len(answer.logprobs) > 0


def test_a_stream(client: cohere.ClientV2, model: str) -> None:
    events = list(client.chat_stream(model=model, messages=FRANCE, temperature=0, max_tokens=16))

    kinds = [event.type for event in events]
    text = "".join(e.delta.message.content.text for e in events if e.type == "content-delta")
    assert kinds[0] == "message-start"
    assert kinds[-1] == "message-end"
    assert "Paris" in text


def test_a_tool_is_called_and_its_result_goes_back(client: cohere.ClientV2, model: str) -> None:
    answer = client.chat(
        model=model, messages=FRANCE, tools=[WEATHER], tool_choice="REQUIRED", max_tokens=64
    )
    call = answer.message.tool_calls[0]
    said = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
    again = client.chat(model=model, messages=[*FRANCE, said, result], max_tokens=8)

    assert answer.finish_reason == "TOOL_CALL"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert again.message.content


def test_a_schema_is_held(client: cohere.ClientV2, model: str) -> None:
    schema = WEATHER["function"]["parameters"] | {"additionalProperties": False}
    answer = client.chat(
        model=model,
        messages=FRANCE,
        response_format={"type": "json_object", "schema": schema},
        max_tokens=32,
    )

    assert json.loads(answer.message.content[0].text)["city"] in ("Paris", "Rome")


def test_errors_have_their_classes(client: cohere.ClientV2, model: str) -> None:
    with pytest.raises(cohere.NotFoundError):
        client.chat(model="nobody", messages=FRANCE)
    with pytest.raises(cohere.BadRequestError) as refused:
        client.chat(model=model, messages=FRANCE, citation_options={"mode": "FAST"})

    assert "citation_options" in str(refused.value)
