"""huggingface_hub's InferenceClient: TGI's API, and chats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError

pytestmark = pytest.mark.ray

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
}


@pytest.fixture(scope="module")
def client(server_url: str) -> InferenceClient:
    return InferenceClient(server_url)


def test_text_generation(client: InferenceClient) -> None:
    prompt = "The capital of France is"
    answer = client.text_generation(prompt, max_new_tokens=4, details=True)
    stream = list(client.text_generation(prompt, max_new_tokens=4, stream=True))

    assert "Paris" in answer.generated_text
    assert answer.details.generated_tokens == 4
    assert "".join(stream) == answer.generated_text


def test_a_grammar_is_held(client: InferenceClient) -> None:
    grammar: Any = {"type": "json", "value": SCHEMA}
    answer = client.text_generation("A city:", max_new_tokens=32, grammar=grammar)

    assert json.loads(answer)["city"] in ("Paris", "Rome")


def test_a_chat(client: InferenceClient, model: str) -> None:
    options: Any = {"model": model, "max_tokens": 16, "temperature": 0}
    answer = client.chat_completion(FRANCE, **options)
    chunks = client.chat_completion(FRANCE, **options, stream=True)

    assert "Paris" in (answer.choices[0].message.content or "")
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_a_tool_and_a_schema(client: InferenceClient, model: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
    called = client.chat_completion(
        FRANCE, model=model, tools=[tool], tool_choice="required", max_tokens=64
    )
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answered = client.chat_completion(FRANCE, model=model, response_format=form, max_tokens=64)

    calls = called.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.name == "go"
    assert json.loads(answered.choices[0].message.content or "")["city"] in ("Paris", "Rome")


def test_errors_have_their_classes(client: InferenceClient, model: str) -> None:
    with pytest.raises(ValidationError):
        client.text_generation("a", max_new_tokens=10**6)
    with pytest.raises(HfHubHTTPError) as unknown:
        client.chat_completion(FRANCE, model="nobody")

    assert unknown.value.response.status_code == 404
