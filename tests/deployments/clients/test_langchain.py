"""langchain-openai."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

pytestmark = pytest.mark.ray


class Answer(BaseModel):
    """The answer."""

    city: Literal["Paris", "Rome"]


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    return f"Sunny in {city}"


@pytest.fixture(scope="module")
def chat(server_url: str, model: str) -> Any:
    return ChatOpenAI(
        base_url=f"{server_url}/v1",
        api_key="any",
        model=model,
        temperature=0,
        max_tokens=64,
        max_retries=0,
    )


def test_an_answer(chat: Any) -> None:
    answer = chat.invoke("What is the capital of France?")

    assert "Paris" in answer.content
    assert answer.usage_metadata["total_tokens"] > 0


def test_a_stream_ends_with_usage(chat: Any) -> None:
    whole: AIMessageChunk | None = None
    for chunk in chat.stream("What is the capital of France?", stream_usage=True):
        whole = chunk if whole is None else whole + chunk

    assert whole is not None
    assert "Paris" in whole.content
    assert whole.usage_metadata is not None


def test_structured_output(chat: Any) -> None:
    assert isinstance(chat.with_structured_output(Answer).invoke("Name a city."), Answer)
    by_tool = chat.with_structured_output(Answer, method="function_calling")
    assert isinstance(by_tool.invoke("Name a city."), Answer)
    by_mode = chat.with_structured_output(None, method="json_mode")
    assert by_mode.invoke('Repeat: {"city": "Paris"}') == {"city": "Paris"}


def test_tools_are_bound_called_and_answered(chat: Any) -> None:
    bound = chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    question = HumanMessage("What is the weather in Paris?")

    called = bound.invoke([question])
    whole: Any = None
    for chunk in bound.stream([question]):
        whole = chunk if whole is None else whole + chunk
    call = called.tool_calls[0]
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    final = chat.bind_tools([get_weather]).invoke([question, called, result])

    assert call["name"] == "get_weather"
    assert whole.tool_calls[0]["args"] == call["args"]
    assert final.content is not None


def test_responses_continue_and_call_custom_tools(server_url: str, model: str) -> None:
    chat: Any = ChatOpenAI(
        base_url=f"{server_url}/v1",
        api_key="any",
        model=model,
        temperature=0,
        max_tokens=64,
        max_retries=0,
        use_responses_api=True,
    )

    first = chat.invoke("What is the capital of France?")
    second = chat.invoke("And of Italy?", previous_response_id=first.response_metadata["id"])
    chunks = list(chat.stream("What is the capital of France?"))
    called = chat.bind_tools([get_weather], tool_choice="any").invoke("The weather in Paris?")

    assert "Paris" in first.text
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
    assert "Paris" in "".join(chunk.text for chunk in chunks)
    assert called.tool_calls[0]["name"] == "get_weather"
