"""End to end through Ray Serve: proxy, replica, engine, and back."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.configs.errors import PromptTooLong, RequestError
from tests.deployments.conftest import SMOL, TINY, Cluster

pytestmark = pytest.mark.ray

FRANCE = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 12,
}
WAIT = httpx.Timeout(120)
NUM = 150  # concurrent requests, of which some disconnect


def make_completion(number: int, **fields: Any) -> dict[str, Any]:
    """Return a greedy request with a prompt and text unique to `number`."""
    prompt = f"Number {number}: the quick brown fox jumps over {number * 7919 % 1000}"
    return {"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields}


def chunks_of(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def held_pages(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return next(float(x.split()[-1]) for x in lines if x.startswith("remora_num_held_pages{"))


async def until_idle(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while await held_pages(client):
            await asyncio.sleep(0.05)


def test_a_streamed_chat_knows_the_capital_of_france(cluster: Cluster) -> None:
    response = httpx.post(
        f"{cluster.url(SMOL)}/v1/chat/completions", json=FRANCE | {"stream": True}, timeout=WAIT
    )

    assert response.headers["content-type"].startswith("text/event-stream")
    assert len(response.headers.get_list("x-request-id")) == 1
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks_of(response.text))
    assert "Paris" in text
    assert response.text.endswith("data: [DONE]\n\n")


async def test_python_handles_chat_and_stream(cluster: Cluster) -> None:
    from ray import serve

    handle = serve.get_app_handle(SMOL)
    answer = await handle.chat.remote(FRANCE)
    chat = handle.options(stream=True).chat_stream.remote(FRANCE)
    pieces = [chunk["choices"][0]["delta"].get("content", "") async for chunk in chat]
    native = handle.options(stream=True).generate.remote(
        {"text": "The capital of France is", "sampling_params": {"temperature": 0}}
    )
    last = [chunk async for chunk in native][-1]

    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert "".join(pieces) == answer["choices"][0]["message"]["content"]
    assert "Paris" in last["text"]
    assert last["meta_info"]["finish_reason"] is not None


async def test_a_handle_streams_what_asks_for_a_stream(cluster: Cluster) -> None:
    from ray import serve

    handle = serve.get_app_handle(SMOL)
    whole = await handle.chat.remote(**FRANCE)
    body = FRANCE | {"stream": True}
    streams = (
        await handle.chat.remote(body),
        handle.options(stream=True).chat.remote(FRANCE),
        handle.options(stream=True).chat.remote(**body),
    )

    text = whole["choices"][0]["message"]["content"]
    assert type(whole["choices"][0]["finish_reason"]) is str
    for stream in streams:
        chunks = [chunk async for chunk in stream]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text
        assert len(chunks) > 3


def test_a_handle_streams_to_a_script(cluster: Cluster) -> None:
    from ray import serve

    handle = serve.get_app_handle(TINY)
    chunks = list(handle.completions.remote(prompt="x", max_tokens=4, stream=True).result())
    refused = handle.completions.remote(prompt="x", max_tokens=100_000, stream=True).result()

    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    with pytest.raises(PromptTooLong):
        list(refused)


async def test_handles_raise_the_original_errors(cluster: Cluster) -> None:
    from ray import serve

    handle = serve.get_app_handle(TINY)
    with pytest.raises(RequestError) as unknown:
        await handle.chat.remote({"messages": "?"})
    with pytest.raises(PromptTooLong) as long:
        await handle.completions.remote({"prompt": "x", "max_tokens": 100_000})

    assert unknown.value.param == "messages"
    assert long.value.code == "context_length_exceeded"


# A cancelled client may leave its socket to the collector, which runs while that is allowed.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
async def test_disconnects_do_not_affect_other_requests(cluster: Cluster) -> None:
    rng = random.Random(5)
    bodies = [make_completion(number, stream=True) for number in range(NUM)]
    leaving = set(rng.sample(range(NUM), NUM * 3 // 10))
    room = asyncio.Semaphore(64)

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        async with room:
            response = await client.post("/v1/completions", json=bodies[number])
        assert response.status_code == 200, response.text
        return "".join(chunk["choices"][0]["text"] for chunk in chunks_of(response.text))

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        async with room:
            try:
                async with asyncio.timeout(rng.uniform(0.0, 0.4)):
                    await client.post("/v1/completions", json=bodies[number])
            except TimeoutError:
                pass

    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=cluster.url(TINY), timeout=WAIT, limits=limits) as client:
        staying = [number for number in range(NUM) if number not in leaving]
        calm = await asyncio.gather(*(ask(client, number) for number in staying))
        await client.post("/flush_cache")
        everyone = [(leave if n in leaving else ask)(client, n) for n in range(NUM)]
        results = await asyncio.gather(*everyone)
        await until_idle(client)
    gc.collect()

    assert [results[number] for number in staying] == calm
    assert len(set(calm)) > 0.9 * len(calm)


async def test_overload_is_refused_with_a_time_and_the_admitted_finish(cluster: Cluster) -> None:
    async with AsyncExitStack() as stack:
        # Many clients: the pool of a single one is slower than the server.
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=cluster.url(TINY), timeout=WAIT, verify=False)
            )
            for _ in range(20)
        ]
        calls = [
            clients[number % 20].post("/v1/completions", json=make_completion(number))
            for number in range(800)
        ]
        responses = await asyncio.gather(*calls)
        await until_idle(clients[0])

    refused = [response for response in responses if response.status_code != 200]
    admitted = [response for response in responses if response.status_code == 200]
    assert len(admitted) >= 80
    assert refused
    assert {response.status_code for response in refused} <= {429, 503}
    for response in refused:
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] in ("rate_limit_error", "overloaded_error")
    assert {r.json()["usage"]["completion_tokens"] for r in admitted} == {24}


async def test_a_killed_replica_comes_back(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url(TINY), timeout=WAIT) as client:
        got, error = await read_while_killing(client)
        async with asyncio.timeout(100):
            again = await until_answered(client, make_completion(1))

    assert isinstance(error, httpx.RemoteProtocolError)
    assert got.startswith(b"data: ")
    assert b"[DONE]" not in got
    assert again.json()["usage"]["completion_tokens"] == 24


async def read_while_killing(client: httpx.AsyncClient) -> tuple[bytes, Exception | None]:
    """Read a long stream, and kill its replica when it has begun."""
    body = make_completion(1, max_tokens=400, stream=True)
    got = b""
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for piece in response.aiter_bytes():
                if not got:
                    os.kill(replica_pid(TINY), signal.SIGKILL)
                got += piece
    except httpx.HTTPError as error:
        return got, error
    return got, None


async def until_answered(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    """Ask as a client that retries; refusals on the way must be retriable."""
    while True:
        response = await client.post("/v1/completions", json=body)
        if response.status_code == 200:
            return response
        assert response.status_code in (500, 503), response.text
        await asyncio.sleep(0.2)


def replica_pid(app: str) -> int:
    title = f"ray::ServeReplica:{app}:LLMServer".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes().startswith(title):
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError(f"no process of {app}")


async def test_the_operators_routes_are_there_when_serve_listens_on_loopback(
    cluster: Cluster,
) -> None:
    async with httpx.AsyncClient(base_url=cluster.url(TINY), timeout=WAIT) as client:
        await until_idle(client)
        response = await client.post("/flush_cache")
    assert (response.status_code, response.json()["success"]) == (200, True)
