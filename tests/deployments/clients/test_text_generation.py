"""TGI's own client, on /generate, /generate_stream and /v1/chat/completions."""

from __future__ import annotations

import json

import pytest
from text_generation import Client
from text_generation.errors import NotFoundError, ValidationError
from text_generation.types import Grammar, GrammarType, Message

pytestmark = pytest.mark.ray

FRANCE = "The capital of France is"


@pytest.fixture(scope="module")
def client(server_url: str) -> Client:
    return Client(server_url, timeout=60)


def test_an_answer_with_details(client: Client) -> None:
    answer = client.generate(FRANCE, max_new_tokens=4, decoder_input_details=True, top_n_tokens=2)

    assert "Paris" in answer.generated_text
    assert answer.details.generated_tokens == len(answer.details.tokens) == 4
    assert len(answer.details.prefill) > 1
    assert all(len(top) >= 2 for top in answer.details.top_tokens or [])


def test_a_stream(client: Client) -> None:
    pieces = list(client.generate_stream(FRANCE, max_new_tokens=4))

    text = "".join(piece.token.text for piece in pieces)
    assert "Paris" in text
    assert pieces[-1].generated_text == text
    assert pieces[-1].details is not None


def test_the_best_of_several(client: Client) -> None:
    answer = client.generate(FRANCE, max_new_tokens=4, best_of=2, do_sample=True, typical_p=0.9)

    assert answer.details.best_of_sequences is not None
    assert len(answer.details.best_of_sequences) == 1
    assert answer.details.seed is not None


def test_a_grammar_is_held(client: Client) -> None:
    grammar = Grammar(type=GrammarType.Regex, value="(Paris|Rome)!")
    answer = client.generate(FRANCE, max_new_tokens=8, grammar=grammar)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    of_json = client.generate(
        FRANCE, max_new_tokens=32, grammar=Grammar(type=GrammarType.Json, value=schema)
    )

    assert answer.generated_text in ("Paris!", "Rome!")
    assert json.loads(of_json.generated_text)["a"] in (1, 2)


def test_chats_name_a_model_that_only_some_servers_take(client: Client) -> None:
    question = Message(role="user", content="What is the capital of France?")
    with pytest.raises(NotFoundError) as unknown:  # with api.any_model_name it would be answered
        client.chat([question], max_tokens=16, seed=1)

    assert "'tgi'" in str(unknown.value)


def test_errors_have_their_classes(client: Client) -> None:
    with pytest.raises(ValidationError):
        client.generate(FRANCE, max_new_tokens=10**6)
