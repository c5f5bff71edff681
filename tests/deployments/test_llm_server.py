"""A replica without Serve, with a tiny model."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import pickle
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.configs.errors import ConfigError, EngineError, InvalidRequest
from remora.deployments.http.batches.store import BatchStore
from remora.deployments.llm_server import LLMServer
from tests.conftest import TinyCheckpoints

HELLO = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 8}


@asynccontextmanager
async def running(
    path: Any, *, skip_tokenizer: bool = False, **api: Any
) -> AsyncGenerator[LLMServer, None]:
    server = LLMServer.__new__(LLMServer)
    engine = {"kv_tokens": 2048, "num_threads": 1}
    model: dict[str, Any] = {"path": str(path), "served_name": "tiny", "dtype": "float32"}
    model |= {"skip_tokenizer": skip_tokenizer}
    await server.__init__({"model": model, "engine": engine, "api": api})  # type: ignore[misc]
    yield server
    server.client.close()


async def test_all_interfaces_return_the_same_text(tiny_checkpoints: TinyCheckpoints) -> None:
    body: dict[str, Any] = {"messages": HELLO, **GREEDY}
    async with running(tiny_checkpoints("llama")) as server:
        whole = await server.chat(body)
        pieces = [chunk["choices"][0]["delta"] async for chunk in server.chat_stream(body)]
        prompt = server.tokenizer.render_chat(HELLO)
        text = await server.completions({"prompt": prompt, "add_special_tokens": False, **GREEDY})
        ids = server.tokenizer.encode(prompt, add_special_tokens=False)
        params = {"temperature": 0, "max_new_tokens": 8}
        native = [c async for c in server.generate({"input_ids": ids, "sampling_params": params})]
        app = server.__serve_build_asgi_app__()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://remora") as client:
            response = await client.post("/v1/chat/completions", json=body)

    expected = whole["choices"][0]["message"]["content"]
    assert expected
    assert "".join(piece.get("content", "") for piece in pieces) == expected
    assert text["choices"][0]["text"] == expected
    assert native[-1]["text"] == expected
    assert response.json()["choices"][0]["message"]["content"] == expected


async def test_the_request_id_is_left_to_serves_proxy(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    async with running(tiny_checkpoints("llama")) as server:
        transport = httpx.ASGITransport(app=server.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://remora") as client:
            response = await client.get("/health")
    assert "x-request-id" not in response.headers


async def test_a_replica_without_tokenizer_takes_ids_and_refuses_texts(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    body = {"input_ids": [17, 300, 42], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    async with running(tiny_checkpoints("llama")) as server:
        expected = [chunk async for chunk in server.generate(body)][-1]["output_ids"]
    async with running(tiny_checkpoints("llama"), skip_tokenizer=True) as server:
        app = server.__serve_build_asgi_app__()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://remora") as client:
            answer = await client.post("/generate", json=body)
            refused = [
                await client.post("/generate", json={"text": "a"}),
                await client.post("/v1/completions", json={"prompt": "a"}),
                await client.post("/v1/chat/completions", json={"messages": HELLO}),
                await client.post("/v1/completions", json={"prompt": [17], "stop": "a"}),
                await client.post("/v1/completions", json={"prompt": [17], "guided_regex": "a"}),
            ]

    assert (answer.json()["output_ids"], answer.json()["text"]) == (expected, "")
    for response in refused:
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "no_tokenizer"


async def test_a_bad_body_is_an_error_that_can_be_pickled(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    async with running(tiny_checkpoints("llama")) as server:
        with pytest.raises(InvalidRequest) as caught:
            await server.chat({"messages": []})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.param, str(copy)) == ("messages", str(caught.value))


async def test_health_fails_with_the_engine(tiny_checkpoints: TinyCheckpoints) -> None:
    async with running(tiny_checkpoints("llama")) as server:
        await server.check_health()

        def fail() -> None:
            raise EngineError("stopped")

        server.client.check_health = fail  # type: ignore[method-assign]
        with pytest.raises(EngineError):
            await server.check_health()


async def test_the_banner_tells_start_up_and_first_token(
    tiny_checkpoints: TinyCheckpoints, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "remora"):
        async with running(tiny_checkpoints("llama")):
            pass
    assert "start-up" in caplog.text
    assert "first token" in caplog.text


async def test_warming_up_leaves_nothing_behind(tiny_checkpoints: TinyCheckpoints) -> None:
    async with running(tiny_checkpoints("llama")) as server:
        stats = server.client.stats()
    assert (stats.num_cached_pages, stats.num_held_pages, stats.num_running) == (0, 0, 0)


@pytest.mark.observes("api.batch_dir")
async def test_a_replica_runs_the_batches_that_it_finds(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    store = BatchStore(tmp_path)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    source = io.BytesIO(json.dumps(line).encode())
    given = store.files.add(source, filename="in.jsonl", purpose="batch", owner="")
    made = store.add(endpoint="/v1/completions", input_file_id=given.id, owner="", metadata=None)
    async with running(tiny_checkpoints("llama"), batch_dir=str(tmp_path)) as server:
        while not (batch := store.find(made.id, None)).has_ended:
            await asyncio.sleep(0.01)
        server.__del__()
        await asyncio.sleep(0)
    assert (batch.status, batch.completed) == ("completed", 1)


async def test_a_key_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api\.api_key"):
        async with running("/no/such/model", api_key=f"file:{tmp_path}/none"):
            pass


@pytest.mark.observes("model.path")
async def test_a_model_that_is_not_there_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        async with running("/no/such/model"):
            pass
