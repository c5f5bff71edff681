"""The anthropic client, on /v1/messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

pytestmark = pytest.mark.ray

GREEDY = {"temperature": 0}  # the client has no argument for it
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def client(server_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server_url, api_key="any", max_retries=0) as client:
        yield client


def test_a_message(client: anthropic.Anthropic, model: str) -> None:
    answer = client.messages.create(
        model=model, max_tokens=16, extra_body=GREEDY, system="Be brief.", messages=FRANCE
    )

    assert answer.content[0].type == "text"
    assert "Paris" in answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens > 0


def test_a_stream(client: anthropic.Anthropic, model: str) -> None:
    with client.messages.stream(
        model=model, max_tokens=16, extra_body=GREEDY, messages=FRANCE
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()

    assert "Paris" in text
    assert final.content[0].type == "text"
    assert final.content[0].text == text


def test_a_tool_is_called_and_its_result_goes_back(client: anthropic.Anthropic, model: str) -> None:
    answer = client.messages.create(
        model=model,
        max_tokens=64,
        extra_body=GREEDY,
        messages=FRANCE,
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )

    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    assert isinstance(call.input, dict)
    again = client.messages.create(
        model=model,
        max_tokens=8,
        messages=[
            *FRANCE,
            {"role": "assistant", "content": [call.model_dump()]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}],
            },
        ],
    )
    assert again.type == "message"


def test_streamed_tool_input_adds_up(client: anthropic.Anthropic, model: str) -> None:
    with client.messages.stream(
        model=model,
        max_tokens=64,
        extra_body=GREEDY,
        messages=FRANCE,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "get_weather"},
    ) as stream:
        final = stream.get_final_message()

    (call,) = [block for block in final.content if block.type == "tool_use"]
    assert set(call.input) == {"city"}


def test_tokens_are_counted(client: anthropic.Anthropic, model: str) -> None:
    count = client.messages.count_tokens(model=model, messages=FRANCE).input_tokens
    answer = client.messages.create(model=model, max_tokens=1, messages=FRANCE)

    usage = answer.usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_models_and_request_ids(client: anthropic.Anthropic, model: str) -> None:
    listed = client.models.list()
    answer = client.messages.with_raw_response.create(model=model, max_tokens=1, messages=FRANCE)

    assert [one.id for one in listed.data] == [model]
    assert client.models.retrieve(model).type == "model"
    assert answer.parse()._request_id == answer.headers["request-id"]


def test_a_document_and_edits_of_the_context(client: anthropic.Anthropic, model: str) -> None:
    notes: Any = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "The word is plum."},
        "title": "Notes",
    }
    answer = client.beta.messages.create(
        model=model,
        max_tokens=4,
        messages=[{"role": "user", "content": [notes, {"type": "text", "text": "The word?"}]}],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        betas=["context-management-2025-06-27"],
    )

    assert answer.context_management is not None
    assert answer.context_management.applied_edits == []


def test_a_message_batch(client: anthropic.Anthropic, model: str) -> None:
    params: Any = {"model": model, "max_tokens": 8, "messages": FRANCE}
    batch = client.messages.batches.create(requests=[{"custom_id": "one", "params": params}])
    deadline = time.monotonic() + 120
    while client.messages.batches.retrieve(batch.id).processing_status != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.5)
    (result,) = client.messages.batches.results(batch.id)

    assert result.custom_id == "one"
    assert result.result.type == "succeeded"
    assert [one.id for one in client.messages.batches.list().data] == [batch.id]
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"


def test_errors_have_their_classes(client: anthropic.Anthropic, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=1, messages=FRANCE)
    with pytest.raises(anthropic.BadRequestError) as too_long:
        client.messages.create(model=model, max_tokens=20_000, messages=FRANCE)

    assert "maximum" in str(too_long.value)
