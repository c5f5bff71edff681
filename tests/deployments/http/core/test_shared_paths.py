"""The dialect of /generate, / and /tokenize: detected from a body, or configured."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.deployments.fakes import FakeServer, make_client, make_config

SGLANG, TGI, LIGHTLLM = "meta_info", "generated_text", "count_output_tokens"


async def post(dialect: str, body: Any) -> httpx.Response:
    server = FakeServer(config=make_config(generate_dialect=dialect))
    async with make_client(server) as client:
        return await client.post("/generate", json=body)


@pytest.mark.parametrize(
    ("dialect", "body", "field"),
    [
        ("auto", {"text": "ab"}, SGLANG),
        ("auto", {"input_ids": [1]}, SGLANG),
        ("auto", {"inputs": "ab"}, TGI),
        ("auto", {"text": "ab", "inputs": "cd"}, SGLANG),
        ("sglang", {"text": "ab"}, SGLANG),
        ("tgi", {"inputs": "ab"}, TGI),
        ("lightllm", {"inputs": "ab"}, LIGHTLLM),
    ],
)
@pytest.mark.observes("api.generate_dialect")
async def test_a_body_is_answered_in_its_dialect(
    dialect: str, body: dict[str, Any], field: str
) -> None:
    response = await post(dialect, body)
    assert response.status_code == 200
    assert field in response.json()


@pytest.mark.parametrize(
    ("dialect", "body", "status"),
    [
        ("auto", {}, 400),
        ("auto", [], 400),
        ("auto", {"inputs": 1}, 422),
        ("sglang", {"inputs": "ab"}, 400),
        ("tgi", {"text": "ab"}, 422),
        ("lightllm", {"text": "ab"}, 400),
    ],
)
async def test_a_fault_is_told_in_the_dialect_that_was_chosen(
    dialect: str, body: Any, status: int
) -> None:
    response = await post(dialect, body)
    assert response.status_code == status
    assert isinstance(response.json()["error"], str if status == 422 else dict)


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({"prompt": "ab"}, {"tokens", "count", "max_model_len"}),
        ({"content": "ab"}, {"tokens"}),
    ],
)
@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_a_text_is_tokenized_in_the_dialect_of_its_body(
    path: str, body: dict[str, Any], fields: set[str]
) -> None:
    async with make_client() as client:
        answer = (await client.post(path, json=body)).json()
    assert set(answer) == fields
    assert answer["tokens"] == [97, 98]


async def test_all_paths_are_described_with_their_bodies() -> None:
    async with make_client() as client:
        description = (await client.get("/openapi.json")).json()
    paths, schemas = description["paths"], description["components"]["schemas"]
    assert "messages" in schemas["ChatBody"]["properties"]
    assert "Message" in schemas

    for path, model in (
        ("/v1/chat/completions", "ChatBody"),
        ("/generate", "GenerateBody"),
        ("/generate_stream", "TgiBody"),
        ("/", "TgiBody"),
        ("/tokens", "TokensBody"),
        ("/api/chat", "OllamaChatBody"),
        ("/api/generate", "OllamaGenerateBody"),
        ("/completion", "LlamaCompletionBody"),
        ("/infill", "InfillBody"),
        ("/apply-template", "ApplyTemplateBody"),
        ("/batch_infer", "RtpBody"),
        ("/tokenizer/encode", "TokenizerEncodeBody"),
        ("/v1/reranker", "RtpRerankerBody"),
        ("/parse_function_call", "ParseCallsBody"),
        ("/separate_reasoning", "SeparateBody"),
        ("/v1/responses", "ResponsesBody"),
        ("/v1/messages", "MessagesBody"),
        ("/v1/messages/count_tokens", "CountTokensBody"),
    ):
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"]["$ref"].endswith(f"/{model}")
