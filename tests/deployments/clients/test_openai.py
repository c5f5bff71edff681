"""The official openai client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.ray

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}


class City(BaseModel):
    name: Literal["Paris", "London"]
    is_capital: bool
    population: int = Field(ge=0, le=99_999_999)


@pytest.fixture(scope="module")
def client(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_a_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=FRANCE, temperature=0, max_completion_tokens=16, logprobs=True
    )

    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_stream_with_usage(client: openai.OpenAI, model: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=FRANCE,
            temperature=0,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    for index in range(2):
        own = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert own[0].delta.role == "assistant"
        assert "Paris" in "".join(c.delta.content or "" for c in own)
        assert [c.finish_reason for c in own if c.finish_reason] == ["stop"]


def test_the_stream_helper(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=FRANCE, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()

    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert "Paris" in (final.choices[0].message.content or "")


def test_parse_gives_a_pydantic_model(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Describe Paris."}],
        response_format=City,
        max_completion_tokens=64,
        temperature=0,
    )

    assert isinstance(answer.choices[0].message.parsed, City)


def test_a_parse_that_runs_out_of_tokens_says_so(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=model, messages=FRANCE, response_format=City, max_completion_tokens=3
        )


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_tool_is_called_when_it_must_be(client: openai.OpenAI, model: str, choice: Any) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_completion_tokens=80,
        temperature=0,
    )

    message = answer.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["unit"] in ("celsius", "fahrenheit")
    assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_streamed_tool_calls_add_up_and_their_results_go_back(
    client: openai.OpenAI, model: str
) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    with client.chat.completions.stream(
        model=model,
        messages=messages,
        tools=[WEATHER, TIME],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=80,
        temperature=0,
    ) as stream:
        names = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message

    assert "tool_calls.function.arguments.delta" in names
    assert message.tool_calls is not None
    call = message.tool_calls[0]
    json.loads(call.function.arguments)
    again = client.chat.completions.create(
        model=model,
        messages=[
            *messages,
            {
                "role": "assistant",
                "tool_calls": [call.model_dump(include={"id", "type", "function"})],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."},
        ],
        max_completion_tokens=8,
    )
    assert again.choices[0].message.content is not None


def test_completions(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model,
        prompt=["The capital of France is", "One, two,"],
        max_tokens=4,
        temperature=0,
        logprobs=2,
        echo=True,
    )

    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("The capital of France is Paris")
    assert answer.choices[0].logprobs is not None


def test_stored_chats(client: openai.OpenAI, model: str) -> None:
    chats = client.chat.completions
    made = chats.create(
        model=model, messages=FRANCE, max_tokens=8, store=True, metadata={"for": "clients"}
    )

    assert chats.retrieve(made.id).choices[0].message == made.choices[0].message
    assert made.id in [one.id for one in chats.list(metadata={"for": "clients"})]
    assert [one.content for one in chats.messages.list(made.id)] == [FRANCE[0]["content"]]
    assert chats.update(made.id, metadata={"for": "us"}).metadata == {"for": "us"}
    assert chats.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        chats.retrieve(made.id)


def test_a_custom_tool_is_called(client: openai.OpenAI, model: str) -> None:
    tool: Any = {"name": "run", "description": "Runs a command"}
    chat = client.chat.completions.create(
        model=model,
        messages=FRANCE,
        tools=[{"type": "custom", "custom": tool}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=80,
        temperature=0,
    )
    response = client.responses.create(
        model=model,
        input="List the files.",
        tools=[{"type": "custom", **tool}],
        tool_choice="required",
        max_output_tokens=80,
        temperature=0,
    )

    (call,) = chat.choices[0].message.tool_calls or []
    assert call.type == "custom"
    assert call.custom.name == "run"
    assert "run" in [item.name for item in response.output if item.type == "custom_tool_call"]


def test_several_conversations_in_one_body(client: openai.OpenAI, model: str) -> None:
    italy = [{"role": "user", "content": "What is the capital of Italy?"}]
    body = {"model": model, "messages": [FRANCE, italy], "max_tokens": 16, "temperature": 0}
    answer = client.post(
        "/chat/completions/batch", body=body, cast_to=openai.types.chat.ChatCompletion
    )

    texts = [choice.message.content or "" for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert "Paris" in texts[0]
    assert texts[1] not in ("", texts[0])


def test_responses(client: openai.OpenAI, model: str) -> None:
    first = client.responses.create(
        model=model, input="What is the capital of France?", temperature=0, max_output_tokens=24
    )
    second = client.responses.create(
        model=model,
        input="And of Italy?",
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=24,
    )

    assert "Paris" in first.output_text
    assert first.status == "completed"
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text


def test_response_streams(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input="Name a city.", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()

    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert final.output_text


def test_a_response_in_the_background_is_polled_and_streamed_again(
    client: openai.OpenAI, model: str
) -> None:
    options: Any = {"model": model, "input": "Name a city.", "max_output_tokens": 8}
    polled = client.responses.create(background=True, **options)
    streamed = list(client.responses.create(background=True, stream=True, **options))
    id_ = streamed[-1].response.id
    again = list(client.responses.retrieve(id_, stream=True, starting_after=2))
    deadline = time.monotonic() + 60
    while polled.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
        polled = client.responses.retrieve(polled.id)

    assert polled.status in ("completed", "incomplete")
    assert [event.type for event in again] == [event.type for event in streamed[3:]]
    assert client.responses.cancel(polled.id).status == polled.status


def test_a_conversation_is_counted_and_compacted(client: openai.OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input="Name a city.", max_output_tokens=8)
    counted = client.responses.input_tokens.count(model=model, input="Name a city.")
    compacted = client.responses.compact(model=model, previous_response_id=first.id)

    assert first.usage is not None
    assert counted.input_tokens == first.usage.input_tokens
    assert compacted.output[-1].type == "compaction"


def test_responses_parse_and_call_tools(client: openai.OpenAI, model: str) -> None:
    parsed = client.responses.parse(
        model=model, input="Describe Paris.", text_format=City, temperature=0, max_output_tokens=64
    )
    called = client.responses.create(
        model=model,
        input="Weather in Paris?",
        tools=[{"type": "function", **WEATHER["function"]}],
        tool_choice="required",
        temperature=0,
        max_output_tokens=80,
    )

    assert isinstance(parsed.output_parsed, City)
    call = next(item for item in called.output if item.type == "function_call")
    assert json.loads(call.arguments)["unit"] in ("celsius", "fahrenheit")


def test_errors_have_their_classes(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=FRANCE)
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model=model, messages=FRANCE, max_tokens=10**6)
    with pytest.raises(openai.BadRequestError) as bad_schema:
        client.chat.completions.create(
            model=model,
            messages=FRANCE,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"$ref": "http://elsewhere/x"}},
            },
        )
    with pytest.raises(openai.APIStatusError) as embeddings:
        client.embeddings.create(model=model, input="Hello")

    assert unknown.value.code == "model_not_found"
    assert too_long.value.code == "context_length_exceeded"
    assert bad_schema.value.param is not None
    assert embeddings.value.status_code in (400, 404)


def test_models(client: openai.OpenAI, model: str) -> None:
    assert [card.id for card in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_a_batch(client: openai.OpenAI, model: str) -> None:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "messages": FRANCE, "max_tokens": 8, "temperature": 0},
        }
        for number in range(3)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)

    assert batch.status == "completed"
    assert batch.output_file_id is not None
    answers = [
        json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()
    ]
    assert {answer["custom_id"] for answer in answers} == {"line-0", "line-1", "line-2"}
    assert all("Paris" in json.dumps(answer["response"]["body"]) for answer in answers)
