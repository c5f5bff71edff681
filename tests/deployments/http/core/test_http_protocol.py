"""Heads end in time and trailers are no headers: over sockets, with the server Serve starts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http import auto

from remora.deployments.http.app import build_http_app
from remora.deployments.http.core import http_protocol
from remora.deployments.http.core.auth import Access, Keys
from remora.deployments.http.core.serve_proxy import middlewares
from remora.deployments.http.generation.server_state import ServerState
from tests.deployments.fakes import FakeServer

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
    b"content-type: application/json\r\nconnection: close\r\n"
)
BODY = b'{"prompt": "Hi", "max_tokens": 1}'
TRAILERS = b"authorization: Bearer key\r\nx-api-key: key\r\nx-request-id: trailer\r\nexpect: x\r\n"


@asynccontextmanager
async def proxied(app: ASGIApp, http: str) -> AsyncGenerator[int, None]:
    """Serve an application as Serve's proxies do; yield the port."""
    for middleware in middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(app, http=http, log_config=None, ws="none", lifespan="off")
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        yield listener.getsockname()[1]
        server.should_exit = True
        await task


async def exchange(port: int, packets: Sequence[bytes]) -> bytes:
    """Send packets, one after another, and return all that the server answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for packet in packets:
        writer.write(packet)
        await writer.drain()
        await asyncio.sleep(0.02)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


def request(headers: bytes) -> bytes:
    chunk = b"%x\r\n%s\r\n" % (len(BODY), BODY)
    return HEAD + headers + b"\r\n" + chunk + b"0\r\n" + TRAILERS + b"\r\n"


@pytest.fixture(autouse=True)
def _own_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)


@pytest.mark.parametrize("http", ["auto", "h11"])
async def test_a_key_in_a_trailer_does_not_count(http: str) -> None:
    access = Access(keys=Keys(["key"]), is_local=True)
    app = build_http_app(ServerState.over(FakeServer()), access=lambda: access)

    async with proxied(app, http) as port:
        smuggled = await exchange(port, [request(b"")])
        genuine = await exchange(port, [request(b"authorization: Bearer key\r\n")])

    assert smuggled.startswith(b"HTTP/1.1 401 ")
    assert genuine.startswith(b"HTTP/1.1 200 ")
    assert b"x-request-id: trailer" not in genuine


async def test_trailers_that_come_late_are_dropped_and_headers_of_the_next_request_kept() -> None:
    seen: list[list[bytes]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.append([name for name, _ in scope["headers"]])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    first = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
    trailers = b"a: b\r\n\r\n"
    second = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with proxied(app, "auto") as port:
        await exchange(port, [first, trailers, second])

    assert seen == [[b"host", b"transfer-encoding"], [b"host", b"connection"]]


async def slow(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(0.4)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


@pytest.mark.parametrize("head", [b"", b"POST / HTTP/1.1\r\nhost: "])
async def test_a_head_that_does_not_end_closes_its_connection(
    monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)

    async with proxied(slow, "auto") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        for _ in range(5):  # bytes that go on coming do not help
            await asyncio.sleep(0.03)
            writer.write(head and b"x")
        assert await asyncio.wait_for(reader.read(), 2) == b""
        writer.close()


async def test_a_request_that_is_answered_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    request = b"GET / HTTP/1.1\r\nhost: x\r\n"

    async with proxied(slow, "auto") as port:
        answer = await exchange(port, [request + b"\r\n", request + b"connection: close\r\n\r\n"])

    assert answer.count(b"HTTP/1.1 204 ") == 2


def chunked(*parts: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(parts)


EXTENSION = b";" + b"e" * 100_000
CLOSING = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("packets", "is_refused"),
    [
        ([chunked(b"1" + EXTENSION + b"\r\nx\r\n0\r\n\r\n")], True),
        ([chunked(), b"1" + EXTENSION], True),  # and no end
        ([chunked(b"1;"), *[b"e" * 5000] * 5], True),
        ([chunked(*[b"1;" + b"e" * 200 + b"\r\nx\r\n"] * 200)], True),
        ([chunked(b"0" + EXTENSION + b"\r\n\r\n")], True),
        ([chunked(b"0\r\n", b"a: b\r\n" * 4000, b"\r\n")], True),
        ([chunked(b"1;a=b\r\nx\r\n" * 20_000, b"0;c=d\r\na: b\r\n\r\n"), CLOSING], False),
        ([chunked(b"186a0;a=b\r\n", b"x" * 100_000, b"\r\n0\r\n\r\n"), CLOSING], False),
        ([b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 3000, CLOSING], False),
        ([b"GET / HTTP/1.1\r\nx: ", b"y" * 30_000, b"z\r\n\r\n", CLOSING], False),
    ],
)
async def test_extensions_of_chunks_are_bounded(packets: list[bytes], is_refused: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.request":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

    async with proxied(app, "auto") as port:
        answer = await exchange(port, packets)

    assert answer.startswith(b"HTTP/1.1 400 " if is_refused else b"HTTP/1.1 204 ")
    assert (b"chunk extensions" in answer) is is_refused
    assert (b" 400 " in answer) is is_refused
