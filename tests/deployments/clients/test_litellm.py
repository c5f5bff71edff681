"""litellm, as an OpenAI-compatible and as a hosted vLLM provider."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

pytestmark = pytest.mark.ray

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(request: pytest.FixtureRequest, server_url: str, model: str) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{model}",
        "api_base": f"{server_url}/v1",
        "api_key": "any",
        "temperature": 0,
        "max_retries": 0,
    }


def test_a_chat(options: dict[str, Any]) -> None:
    answer = litellm.completion(**options, messages=FRANCE, max_tokens=16)

    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens > 0


def test_a_stream(options: dict[str, Any]) -> None:
    chunks = litellm.completion(**options, messages=FRANCE, max_tokens=16, stream=True)

    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_tools_and_schemas(options: dict[str, Any]) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    called = litellm.completion(
        **options,
        messages=FRANCE,
        max_tokens=64,
        tools=[{"type": "function", "function": {"name": "go", "parameters": schema}}],
        tool_choice={"type": "function", "function": {"name": "go"}},
    )
    answered = litellm.completion(
        **options,
        messages=FRANCE,
        max_tokens=64,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        },
    )

    arguments = called.choices[0].message.tool_calls[0].function.arguments
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    assert json.loads(answered.choices[0].message.content)["city"] in ("Paris", "Rome")


def test_errors_are_told_apart(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**options, messages=FRANCE, max_tokens=10**6)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**options | {"model": "openai/nobody"}, messages=FRANCE)


def test_responses(server_url: str, model: str) -> None:
    to: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": f"{server_url}/v1",
        "api_key": "any",
    }
    first = litellm.responses(**to, input="What is the capital of France?", max_output_tokens=24)
    second = litellm.responses(
        **to, input="And of Italy?", previous_response_id=first.id, max_output_tokens=24
    )

    assert first.status in ("completed", "incomplete")
    assert second.usage.input_tokens > first.usage.input_tokens


def test_messages_of_anthropic(server_url: str, model: str) -> None:
    answer = litellm.completion(
        model=f"anthropic/{model}",
        api_base=server_url,
        api_key="any",
        messages=FRANCE,
        max_tokens=16,
        temperature=0,
        max_retries=0,
    )

    assert "Paris" in answer.choices[0].message.content
