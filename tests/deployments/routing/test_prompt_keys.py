"""Keys made from requests: what a replica will do with the prompt, and whose session it is."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import pytest

from remora.configs.schema import ServeConfig
from remora.deployments.http.generation.endpoint import run
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.routing.key import RouteKey, pages_of
from remora.deployments.routing.prompt_keys import PromptKeys
from tests.conftest import TinyCheckpoints
from tests.deployments.pooling_replica import running

CHAT = "/v1/chat/completions"
WORDS = "What is the capital of France, and who lives there? " * 4
MESSAGES = [{"role": "user", "content": WORDS}]
SHORT = {"temperature": 0, "max_tokens": 2}
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {
        "messages": MESSAGES,
        "cache_salt": "tenant",
        "response_format": {"type": "json_object"},
    },
    "/v1/completions": {"prompt": WORDS, **SHORT},
    "/v1/responses": {"input": WORDS, "temperature": 0, "max_output_tokens": 2},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, **SHORT},
    "/generate": {"text": WORDS[5:], "sampling_params": {"max_new_tokens": 2}},
    "/generate_stream": {"inputs": WORDS[9:], "parameters": {"max_new_tokens": 2}},
    "/": {"prompt": WORDS[13:], "generate_config": {"max_new_tokens": 2}},
    "/api/chat": {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 2}},
}


def make_config(path: Any = "nowhere", **routing: Any) -> ServeConfig:
    return ServeConfig.model_validate(make_args(path, **routing))


def make_args(path: Any, **routing: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(path), "served_name": "tiny", "dtype": "float32"},
        "engine": {"kv_tokens": 8192, "num_threads": 1, "page_size": 16},
        "routing": {"policy": "prefix", **routing},
    }


async def test_pages_of_a_request_are_those_that_the_replica_then_reports(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    model = tiny_checkpoints("llama")
    args = make_args(model)
    # Whatever the number of replicas.
    several = args | {"parallel": {"num_replicas": 3}}
    keys = PromptKeys(ServeConfig.model_validate(several))
    async with running(model, **args) as (_, server):
        for path, body in BODIES.items():
            owner = "" if path == CHAT else "key"
            await server._served.client.flush_cache()
            key = await keys.of(path, {}, body, owner)
            job, _ = await keys._endpoints[path].job(
                server._served, body, RequestContext(request_id=uuid.uuid4().hex, owner=owner)
            )
            await run(server._served, job)

            reported = pages_of((await server.record_routing_stats())["page_hashes"])

            pages = pages_of(key.page_hashes)
            assert len(pages) > 2, path
            assert reported[: len(pages)] == pages, path


async def test_bodies_with_a_fault_or_without_a_prompt_are_routed_by_load(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    keys = PromptKeys(make_config(tiny_checkpoints("llama")))

    faulty: list[Any] = [{"messages": "?"}, {"messages": MESSAGES, "model": "x"}, [], None, "text"]
    loading = [
        ("/api/generate", {"model": "tiny"}),
        ("/api/chat", {"model": "tiny", "messages": []}),
    ]
    for path, body in [*((CHAT, body) for body in faulty), *loading]:
        assert await keys.of(path, {"content-length": "400"}, body) == RouteKey(num_tokens=100)


async def test_a_model_that_is_not_here_is_no_reason_to_refuse() -> None:
    keys = PromptKeys(make_config("no/such/folder"))

    assert await keys.of(CHAT, {}, BODIES[CHAT]) == RouteKey()


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({"x-chat": "h"}, {"prompt_cache_key": "k", "user": "u"}, "h"),
        ({}, {"prompt_cache_key": "k", "user": "u"}, "k"),
        ({}, {"prompt_cache_key": "", "user": "u"}, "u"),
        ({}, {"user": 3}, None),
        ({}, {"user": "x" * 9999}, "x" * 512),
        ({}, None, None),
    ],
)
async def test_a_session_is_named_by_header_or_body(
    headers: dict[str, str], body: Any, session: str | None
) -> None:
    keys = PromptKeys(make_config(policy="session", session_header="X-Chat"))

    assert (await keys.of(CHAT, headers, body)).session == session


def make_adapter_args(adapters: list[dict[str, str]]) -> dict[str, Any]:
    return make_args("nowhere", policy="lora") | {"lora": {"adapters": adapters}}


TWO_ADAPTERS = [{"name": name, "path": name} for name in ("x", "y")]


@pytest.mark.parametrize(
    ("path", "body", "adapter"),
    [
        (CHAT, {"model": "x"}, "x"),
        (CHAT, {"model": "tiny:x"}, "x"),
        (CHAT, {"model": "tiny"}, None),
        (CHAT, {"model": "nobody's"}, "nobody's"),
        (CHAT, {"model": "x" * 9999}, "x" * 512),
        (CHAT, {"model": 3}, None),
        (CHAT, {"model": ["x"]}, None),
        (CHAT, {}, None),
        (CHAT, None, None),
        (CHAT, ["x"], None),
        (CHAT, {"lora_path": "x"}, None),
        ("/v1/messages", {"model": "x"}, "x"),
        ("/generate", {"lora_path": "x"}, "x"),
        ("/generate", {"lora_path": "tiny:x", "model": "y"}, "x"),
        ("/generate", {"lora_path": [None, "y", "x"]}, "y"),
        ("/generate", {"lora_path": [None], "model": "x"}, "x"),
        ("/generate", {"lora_path": None}, None),
        ("/generate", {"parameters": {"adapter_id": "x"}}, "x"),
        ("/generate_stream", {"parameters": {"adapter_id": "x"}, "model": "tiny"}, "x"),
        ("/generate_stream", {"parameters": ["x"]}, None),
        ("/completion", {"model": "x", "parameters": {"adapter_id": "y"}}, "x"),
        ("/api/chat", {"model": "x:latest"}, "x"),
        ("/api/chat", {"model": "tiny:x"}, "x"),
        ("/api/chat", {"model": "tiny:latest"}, None),
        ("/tokenize", {"model": "x"}, None),
        ("/", {"prompt": "a", "adapter_name": "x"}, "x"),
        ("/", {"prompt": "a", "generate_config": {"adapter_name": ["y", "x"]}}, "y"),
        ("/", {"inputs": "a", "adapter_name": "x"}, None),
        ("/batch_infer", {"prompt_batch": ["a"], "generation_config": 1, "model": "x"}, "x"),
    ],
)
async def test_an_adapter_is_named_by_the_body(path: str, body: Any, adapter: str | None) -> None:
    keys = PromptKeys(ServeConfig.model_validate(make_adapter_args(TWO_ADAPTERS)))

    key = await keys.of(path, {"content-length": "40"}, body)

    assert key == RouteKey(num_tokens=10, adapter=adapter)


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(make_adapter_args(TWO_ADAPTERS[:1]), id="the only adapter is merged"),
        pytest.param(make_args("nowhere", policy="shortest_queue"), id="another policy"),
    ],
)
async def test_a_key_names_no_adapter_where_none_is_routed_by(args: dict[str, Any]) -> None:
    keys = PromptKeys(ServeConfig.model_validate(args))

    assert (await keys.of(CHAT, {}, {"model": "x"})).adapter is None
