"""The sampling parameters that the body of each API becomes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deployments.fakes import FakeServer, make_config, make_plan
from tests.deployments.http.streams import ask

HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
LIGHTLLM = {"generate_dialect": "lightllm"}
# Ollama's options that have the names of the engine.
OPTIONS = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7, "typical_p": 0.9}
OPTIONS |= {"presence_penalty": 1.0, "frequency_penalty": 0.5}
RENAMED = {"num_predict": 5, "stop": ["x"], "repeat_penalty": 1.5, "num_ctx": 4096}

Row = tuple[dict[str, Any], dict[str, Any]]
# Parameters of TGI's body, and what the engine is asked for: TGI's defaults, not the model's.
TGI: list[Row] = [
    ({}, {"temperature": 0.0, "max_tokens": 100, "repetition_penalty": 1.0}),
    ({"do_sample": False}, {"temperature": 0.0}),
    ({"do_sample": True}, {"temperature": 1.0}),
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"temperature": 1.0}, {"temperature": 0.0}),
    ({"top_p": 0.5}, {"temperature": 1.0}),
    ({"typical_p": 0.5}, {"temperature": 1.0, "typical_p": 0.5}),
    ({"typical_p": 1.0}, {"temperature": 0.0, "typical_p": 1.0}),
    ({"top_k": 5}, {"temperature": 1.0}),
    ({"do_sample": True, "temperature": 0.0}, {"temperature": 0.0}),
    ({"do_sample": True, "seed": 7}, {"seed": 7}),
    ({"stop": ["x"]}, {"stop": ("x",), "include_stop_in_output": True}),
]
# Parameters of LightLLM's body, with the temperature that the model recommends.
LIGHT: list[tuple[float | None, dict[str, Any], dict[str, Any]]] = [
    (None, {}, {"temperature": 0.0, "max_tokens": 16}),
    (0.6, {}, {"temperature": 0.6}),
    (0.6, {"do_sample": False}, {"temperature": 0.0}),
    (0.0, {"do_sample": True}, {"temperature": 1.0}),
    (None, {"do_sample": True, "temperature": 0.5}, {"temperature": 0.5}),
    (None, {"temperature": 0.5}, {"temperature": 0.0}),
    (None, {"stop_sequences": "x"}, {"stop": ("x",), "stop_token_ids": ()}),
    (None, {"stop_sequences": ["x", "y"]}, {"stop": ("x", "y"), "stop_token_ids": ()}),
    (None, {"stop_sequences": [[5], [6]]}, {"stop": (), "stop_token_ids": (5, 6)}),
    (None, {"allowed_token_ids": [1, 2]}, {"allowed_token_ids": (1, 2)}),
    (None, {"n": 1, "best_of": 3, "do_sample": True}, {"n": 3}),
]
OTHERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "/api/chat",
        HELLO | {"options": OPTIONS | RENAMED},
        OPTIONS | {"max_tokens": 5, "stop": ("x",), "repetition_penalty": 1.5},
    ),
    *(
        ("/api/chat", HELLO | {"options": {"num_predict": num}}, {"max_tokens": None})
        for num in (-2, -1, 0)
    ),
    ("/v1/messages", HELLO | {"max_tokens": 9, "stop_sequences": ["x"]}, {"stop": ("x",)}),
    ("/v1/messages", HELLO | {"max_tokens": 9}, {"stop": (), "max_tokens": 9}),
    ("/v1/responses", {"input": "a", "stop": "x"}, {"stop": ("x",)}),
    ("/v1/responses", {"input": "a", "stop": ["x"]}, {"stop": ("x",)}),
    (
        "/v1/chat/completions",
        HELLO | {"max_tokens": 1, "max_completion_tokens": 3},
        {"max_tokens": 3},
    ),
    ("/v1/chat/completions", HELLO, {"max_tokens": None, "typical_p": 1.0}),
    ("/v1/chat/completions", HELLO | {"typical_p": 0.5}, {"typical_p": 0.5}),
    (
        "/api/chat",
        HELLO | {"options": {"presence_penalty": 1.0, "repeat_last_n": 0}},
        {"presence_penalty": 0.0, "repetition_penalty": 1.0},
    ),
]
RECOMMENDED = {"temperature": 0.6, "repetition_penalty": 1.3}
ROWS = [
    *(
        ("/generate", {}, RECOMMENDED, {"inputs": "ab", "parameters": sent}, wanted)
        for sent, wanted in TGI
    ),
    *(
        (
            "/generate",
            LIGHTLLM,
            {} if temperature is None else {"temperature": temperature},
            {"inputs": "ab", "parameters": sent},
            wanted,
        )
        for temperature, sent, wanted in LIGHT
    ),
    *((path, {}, {}, body, wanted) for path, body, wanted in OTHERS),
]


@pytest.mark.parametrize(("path", "api", "defaults", "body", "wanted"), ROWS)
async def test_a_body_becomes_sampling_parameters(
    path: str,
    api: dict[str, Any],
    defaults: dict[str, Any],
    body: dict[str, Any],
    wanted: dict[str, Any],
) -> None:
    server = FakeServer(config=make_config(**api), generation_defaults=defaults)

    response = await ask(path, server, **body)

    assert response.status_code == 200, response.text
    sampling = server.client.requests[0].sampling
    assert {name: getattr(sampling, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ({"max_tokens": 20_000, "logprobs": 20}, None),
        ({"max_tokens": 20_000, "n": 3}, None),
        ({"max_tokens": 20_000, "logprobs": 20, "n": 3}, "logprobs"),
        ({"prompt": ["a" * 30_000] * 4, "echo": True, "logprobs": 20, "max_tokens": 0}, "logprobs"),
    ],
)
async def test_log_probabilities_of_a_completion_are_bounded_in_all(
    body: dict[str, Any], refused: str | None
) -> None:
    await check_bound("/v1/completions", {"prompt": "ab"} | body, refused)


@pytest.mark.parametrize("stream", [False, True])
async def test_streamed_log_probabilities_have_a_lower_limit(stream: bool) -> None:
    body = {"text": "ab", "return_logprob": True, "top_logprobs_num": 20, "stream": stream}
    body |= {"sampling_params": {"max_new_tokens": 2000}}
    await check_bound("/generate", body, "top_logprobs_num" if stream else None)


async def test_log_probabilities_of_a_chat_are_bounded_in_all() -> None:
    body = HELLO | {"logprobs": True, "top_logprobs": 20, "n": 8, "max_tokens": 10_000}
    await check_bound("/v1/chat/completions", body, "top_logprobs")


async def check_bound(path: str, body: dict[str, Any], refused: str | None) -> None:
    """Ask a server with a large context; `refused` is the field that the error names."""
    server = FakeServer(plan=make_plan(max_model_len=40_000, num_pages=4000))
    response = await ask(path, server, **body)
    assert response.status_code == (200 if refused is None else 400)
    if refused is not None:
        assert response.json()["error"]["param"] == refused
