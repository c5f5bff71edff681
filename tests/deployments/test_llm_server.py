"""A replica without Serve, with a tiny model."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import pickle
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from remora.configs.errors import ConfigError, EngineError, InvalidRequest
from remora.deployments.http.batches.store import BatchStore
from remora.deployments.llm_server import LLMServer
from tests.conftest import TinyCheckpoints
from tests.deployments import pooling_replica

HELLO = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 8}


def running(
    path: Any, *, skip_tokenizer: bool = False, **api: Any
) -> AbstractAsyncContextManager[tuple[httpx.AsyncClient, LLMServer]]:
    model = {"served_name": "tiny", "dtype": "float32", "skip_tokenizer": skip_tokenizer}
    return pooling_replica.running(path, model=model, engine={"kv_tokens": 2048}, api=api)


async def test_all_interfaces_return_the_same_text(tiny_checkpoints: TinyCheckpoints) -> None:
    body: dict[str, Any] = {"messages": HELLO, **GREEDY}
    async with running(tiny_checkpoints("llama")) as (client, server):
        whole = await server.chat(body)
        pieces = [chunk["choices"][0]["delta"] async for chunk in server.chat_stream(body)]
        prompt = server._served.tokenizer.render_chat(HELLO)
        text = await server.completions({"prompt": prompt, "add_special_tokens": False, **GREEDY})
        ids = server._served.tokenizer.encode(prompt, add_special_tokens=False)
        params = {"temperature": 0, "max_new_tokens": 8}
        native = [c async for c in server.generate({"input_ids": ids, "sampling_params": params})]
        response = await client.post("/v1/chat/completions", json=body)

    expected = whole["choices"][0]["message"]["content"]
    assert expected
    assert "".join(piece.get("content", "") for piece in pieces) == expected
    assert text["choices"][0]["text"] == expected
    assert native[-1]["text"] == expected
    assert response.json()["choices"][0]["message"]["content"] == expected


async def test_handles_take_keywords_and_give_plain_values(
    tiny_checkpoints: TinyCheckpoints, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tiny_checkpoints("llama")) as (client, server):
        whole = await server.chat(messages=HELLO, **GREEDY)
        mixed = await server.chat({"messages": HELLO}, **GREEDY)
        typo = await server.chat({"messages": HELLO, "max_tokns": 8}, **GREEDY)
        chunks = [chunk async for chunk in await server.chat(messages=HELLO, stream=True, topp=1)]
        texts = [chunk async for chunk in await server.completions(prompt="a", stream=True)]
        with pytest.raises(InvalidRequest, match="given twice"):
            await server.chat({"messages": HELLO, "max_tokens": 1}, max_tokens=2)
        with pytest.raises(InvalidRequest, match="of type str"):
            await server.chat("Hi")  # type: ignore[arg-type]
        response = await client.post("/v1/chat/completions", json={"messages": HELLO, **GREEDY})

    for answer in (whole, mixed, typo, response.json()):
        assert answer["choices"] == whole["choices"]
    assert typo["ignored_fields"] == {"max_tokns": "max_tokens"}
    assert "ignored_fields" not in whole
    assert chunks[0]["ignored_fields"] == {"topp": "top_p"}
    assert all("ignored_fields" not in chunk for chunk in chunks[1:])
    for answer in (whole, *chunks, *texts):
        assert type(answer["choices"][-1]["finish_reason"]) in (str, type(None))
    assert "did you mean max_tokens?" in caplog.text


async def test_a_replica_has_started(
    tiny_checkpoints: TinyCheckpoints, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "remora"):
        async with running(tiny_checkpoints("llama")) as (client, server):
            stats = server._served.client.stats()
            health = await client.get("/health")
            with pytest.raises(InvalidRequest) as caught:
                await server.chat({"messages": []})
            await server.check_health()
            failed = mock.patch.object(
                server._served.client, "check_health", side_effect=EngineError("x")
            )
            with failed, pytest.raises(EngineError):
                await server.check_health()

    assert "start-up" in caplog.text
    assert "first token" in caplog.text
    # The warm-up leaves nothing.
    assert (stats.num_cached_pages, stats.num_held_pages, stats.num_running) == (0, 0, 0)
    # Serve's proxy sets the request id.
    assert "x-request-id" not in health.headers
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.param, str(copy)) == ("messages", str(caught.value))


async def test_a_replica_without_tokenizer_takes_ids_and_refuses_texts(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    body = {"input_ids": [17, 300, 42], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    async with running(tiny_checkpoints("llama")) as (_, server):
        expected = [chunk async for chunk in server.generate(body)][-1]["output_ids"]
    async with running(tiny_checkpoints("llama"), skip_tokenizer=True) as (client, _):
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


@pytest.mark.observes("api.batch_dir")
async def test_a_replica_runs_the_batches_that_it_finds(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    store = BatchStore(tmp_path)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    source = io.BytesIO(json.dumps(line).encode())
    given = store.files.add(source, filename="in.jsonl", purpose="batch", owner="")
    made = store.add(endpoint="/v1/completions", input_file_id=given.id, owner="", metadata=None)
    async with running(tiny_checkpoints("llama"), batch_dir=str(tmp_path)):
        while not (batch := store.find(made.id, None)).has_ended:
            await asyncio.sleep(0.01)
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
