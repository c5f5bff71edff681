"""The official client over a real socket: errors have its classes, and disconnects are seen."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from starlette.types import ASGIApp

from remora.configs.errors import EngineError, QueueFull, Unavailable
from tests.deployments.fakes import FakeEngine, FakeServer, make_app, make_plan

HELLO: Any = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def listening(server: FakeServer) -> AsyncGenerator[str, None]:
    """Serve on a free port of this machine; yield the address."""
    async with listening_app(make_app(server)) as url:
        yield url


@asynccontextmanager
async def listening_app(app: ASGIApp) -> AsyncGenerator[str, None]:
    """Run an application on a free port of this machine; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, ws="none", lifespan="off")
        uvicorn_server = uvicorn.Server(config)
        task = asyncio.create_task(uvicorn_server.serve(sockets=[listener]))
        while not uvicorn_server.started:
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        uvicorn_server.should_exit = True
        await task


@asynccontextmanager
async def openai_client(server: FakeServer) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with (
        listening(server) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QueueFull("m"), openai.RateLimitError),
        (Unavailable("m"), openai.InternalServerError),
        (EngineError("m"), openai.InternalServerError),
    ],
)
async def test_refusals_become_the_clients_errors(error: Exception, kind: type[Exception]) -> None:
    async with openai_client(FakeServer(FakeEngine(error=error))) as client:
        with pytest.raises(kind):
            await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)


async def test_faults_of_a_request_have_their_codes() -> None:
    async with openai_client(FakeServer(plan=make_plan(max_model_len=10))) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=HELLO)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


async def test_a_failure_in_mid_stream_is_an_error() -> None:
    server = FakeServer(FakeEngine(error=EngineError("m"), fail_at=2))
    async with openai_client(server) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="engine failed"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [True, False])
async def test_closing_the_socket_aborts_the_request(stream: bool) -> None:
    server = FakeServer(FakeEngine(gate=asyncio.Event()))
    async with listening(server) as url:
        body = {"messages": HELLO, "stream": stream}
        async with httpx.AsyncClient(base_url=url) as client:
            call = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            while not server.client.running:
                await asyncio.sleep(0.005)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        async with asyncio.timeout(10):
            await server.client.gone.wait()

    assert server.client.running == set()
