"""The ollama client, on /api/*."""

from __future__ import annotations

import json
from typing import Any

import ollama
import pytest

pytestmark = pytest.mark.ray

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 16}


@pytest.fixture(scope="module")
def client(server_url: str) -> ollama.Client:
    return ollama.Client(host=server_url)


def test_a_chat(client: ollama.Client, model: str) -> None:
    answer = client.chat(model=model, messages=FRANCE, options=GREEDY)

    assert "Paris" in (answer.message.content or "")
    assert answer.done
    assert answer.done_reason == "stop"
    assert (answer.eval_count or 0) > 0
    assert (answer.total_duration or 0) > 0


def test_a_chat_stream(client: ollama.Client, model: str) -> None:
    parts = list(client.chat(model=model, messages=FRANCE, options=GREEDY, stream=True))

    assert "Paris" in "".join(part.message.content or "" for part in parts)
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_generate_with_a_schema(client: ollama.Client, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
    }

    answer = client.generate(
        model=model, prompt="Name a city.", format=schema, options={"num_predict": 64}
    )

    assert json.loads(answer.response)["city"] in ("Paris", "Rome")


def test_models_are_listed_and_shown(client: ollama.Client, model: str) -> None:
    assert model in [entry.model for entry in client.list().models]
    assert client.show(model) is not None
    assert model in [entry.model for entry in client.ps().models]


def test_an_answers_context_continues_it(client: ollama.Client, model: str) -> None:
    first = client.generate(model=model, prompt="My name is Ada.", options=GREEDY)
    second = client.generate(
        model=model, prompt="What is my name?", context=first.context, options=GREEDY
    )

    assert (second.prompt_eval_count or 0) > len(first.context or ())
    assert (first.load_duration or 0) > 0


def test_a_served_model_is_pulled(client: ollama.Client, model: str) -> None:
    steps = [step.status for step in client.pull(model, stream=True)]

    assert steps[-1] == client.pull(model).status == "success"
    assert client.show(model).details is not None


def test_errors(client: ollama.Client, model: str) -> None:
    with pytest.raises(ollama.ResponseError) as unknown:
        client.chat(model="nobody", messages=FRANCE)
    with pytest.raises(ollama.ResponseError) as embedding:
        client.embed(model=model, input="Hello")

    assert unknown.value.status_code == 404
    assert embedding.value.status_code == 400
    assert unknown.value.error
