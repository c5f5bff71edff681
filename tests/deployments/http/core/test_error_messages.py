"""What a fault of a body says: a sentence about the field, in the words of who sent it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deployments.fakes import FakeServer, make_client, make_config

HELLO = [{"role": "user", "content": "Hi"}]
FAULTS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "/v1/completions",
        {"prompt": "a", "stream": True, "stream_options": 5},
        "stream_options must be a JSON object.",
    ),
    (
        "/v1/completions",
        {"prompt": [1, "a"]},
        "prompt must hold whole numbers only where it is a list of token ids.",
    ),
    (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {"a": 1}},
        "logit_bias must have token ids, written as whole numbers, for keys.",
    ),
    (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {"1": "a"}},
        "logit_bias must have numbers for values.",
    ),
    (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {"1": 101}},
        "logit_bias must have values between -100 and 100.",
    ),
    (
        "/v1/completions",
        {"prompt": "a", "metadata": {"a": 1}},
        "metadata must have texts for values.",
    ),
    (
        "/v1/chat/completions",
        {"messages": HELLO, "chat_template_kwargs": {"a b": 1}},
        "chat_template_kwargs must have plain names for keys.",
    ),
    (
        "/v1/chat/completions",
        {"messages": HELLO, "chat_template_kwargs": {"a": [1]}},
        "chat_template_kwargs must have texts, numbers, true or false for values.",
    ),
    ("/tokenize", {"text": "a"}, "prompt is required unless messages is given."),
    (
        "/tokenize",
        {"prompt": "a", "messages": HELLO},
        "prompt cannot be combined with messages; send one of them.",
    ),
)


@pytest.mark.parametrize(("path", "body", "message"), FAULTS)
async def test_a_fault_is_a_sentence(path: str, body: dict[str, Any], message: str) -> None:
    async with make_client() as client:
        response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


async def test_a_way_to_think_that_does_not_exist_is_told_with_those_that_do() -> None:
    async with make_client() as client:
        response = await client.post("/api/chat", json={"messages": HELLO, "think": "deeply"})
    assert response.json()["error"] == "think must be true, false, low, medium, high or max."


@pytest.mark.parametrize("dialect", ["tgi", "lightllm"])
async def test_no_parameters_may_be_written_as_null(dialect: str) -> None:
    async with make_client(FakeServer(config=make_config(generate_dialect=dialect))) as client:
        response = await client.post("/generate", json={"inputs": "a", "parameters": None})
    assert response.status_code == 200


async def test_no_alternatives_may_be_asked_for_without_log_probabilities() -> None:
    body = {"messages": HELLO, "top_logprobs": 0}
    async with make_client() as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.json()["choices"][0]["logprobs"] is None
