"""Limits of URLs, headers and bodies, over ASGI and over a real socket."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest

from remora.configs.sections.limits import LimitsSection
from remora.deployments.http.core import edge
from remora.engine.types import Output, Request
from tests.deployments.fakes import (
    FakeEngine,
    FakeServer,
    make_client,
    make_plan,
    make_server_config,
)
from tests.deployments.http.openai.test_openai_client import listening
from tests.deployments.http.refusals import outcome_of, refusals_of

DEFAULTS = LimitsSection()
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
MAX_BODY_BYTES = 1000


async def get(url: str, headers: list[tuple[bytes, bytes]], **limits: Any) -> Any:
    """Send a request with exactly these headers."""
    server = FakeServer(config=make_server_config(limits=limits))
    async with make_client(server) as client:
        request = httpx.Request("GET", f"http://remora{url}")
        request.headers = httpx.Headers(headers)
        return await outcome_of(await client.send(request), client)


def sized(limit: str, size: int) -> tuple[str, list[tuple[bytes, bytes]]]:
    """Return the URL and the headers of a request whose limited part has this size."""
    if limit == "max_url_bytes":
        path = "/v1/models?"
        return path + "x" * (size - len(path) + 1), []  # the question mark does not count
    if limit == "max_headers":
        return "/v1/models", [(b"x-%d" % number, b"") for number in range(size)]
    return "/v1/models", [(b"x-a", b"v" * (size - 3))]


@pytest.mark.parametrize("is_default", [True, False])
@pytest.mark.parametrize(
    ("limit", "at", "expected"),
    [("max_url_bytes", 100, 414), ("max_headers", 20, 431), ("max_header_bytes", 2000, 431)],
)
@pytest.mark.observes("limits.max_url_bytes", "limits.max_headers", "limits.max_header_bytes")
async def test_urls_and_headers_have_limits(
    limit: str, at: int, expected: int, is_default: bool
) -> None:
    limits = {} if is_default else {limit: at}
    at = getattr(LimitsSection.model_validate(limits), limit)

    url, headers = sized(limit, at)
    assert await get(url, headers, **limits) == (200, "", [])
    url, headers = sized(limit, at + 1)
    status, message, counted = await get(url, headers, **limits)
    assert (status, counted) == (expected, [limit])
    assert {str(at), str(at + 1)} <= set(re.findall(r"\d+", message))


def make_body(num_bytes: int) -> bytes:
    head, tail = b'{"prompt": "', b'", "max_tokens": 1}'
    return head + b"x" * (num_bytes - len(head) - len(tail)) + tail


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(
    ("excess", "status", "counted"), [(0, 200, []), (1, 413, ["max_body_bytes"])]
)
@pytest.mark.observes("api.max_body_bytes")
async def test_the_length_of_a_body(
    excess: int, status: int, counted: list[str], declared: bool
) -> None:
    body = make_body(MAX_BODY_BYTES + excess)

    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    server = FakeServer(config=make_server_config(api={"max_body_bytes": MAX_BODY_BYTES}))
    async with make_client(server) as client:
        content = body if declared else pieces()
        response = await client.post(COMPLETIONS, content=content, headers=JSON)
        found, message, refusals = await outcome_of(response, client)
    assert (found, refusals) == (status, counted)
    assert not message or str(MAX_BODY_BYTES) in message


async def test_bodies_of_16_mib_are_taken_unless_something_else_is_said() -> None:
    plan = make_plan(max_model_len=10**8, num_pages=10**7)
    async with make_client(FakeServer(plan=plan)) as client:
        taken = await client.post(COMPLETIONS, content=make_body(16 * 2**20), headers=JSON)
        refused = await client.post(COMPLETIONS, content=make_body(16 * 2**20 + 1), headers=JSON)
    assert (taken.status_code, refused.status_code) == (200, 413)


async def test_a_body_that_declares_an_absurd_length_is_refused_unread() -> None:
    pieces_read = []

    async def unread() -> AsyncGenerator[bytes, None]:
        pieces_read.append(b"")
        yield b""

    async with make_client() as client:
        headers = JSON | {"content-length": "9" * 30}
        response = await client.post(COMPLETIONS, content=unread(), headers=headers)
    assert (response.status_code, pieces_read) == (413, [])


@pytest.mark.parametrize("text", [b"9" * 1000, b'a\\"' + b"9" * 100, b"1" * 70 + b"a" * 200_000])
async def test_digits_within_a_text_are_text(text: bytes) -> None:
    async with make_client() as client:
        body = b'{"prompt": "a", "max_tokens": 1, "extra": "' + text + b'"}'
        response = await client.post(COMPLETIONS, content=body, headers=JSON)
    assert response.status_code == 200


@pytest.mark.parametrize("content_length", [None, "20"])
async def test_the_time_of_processing_leaves_out_the_upload(
    monkeypatch: pytest.MonkeyPatch, content_length: str | None
) -> None:
    now = 0.0

    class SlowEngine(FakeEngine):
        async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
            nonlocal now
            now += 2.0
            async for output in super().generate(request):
                yield output

    async def upload() -> AsyncGenerator[bytes, None]:
        nonlocal now
        for piece in (b'{"prompt"', b': "abcdef"}'):
            now += 5.0
            yield piece

    monkeypatch.setattr(edge, "time", SimpleNamespace(perf_counter=lambda: now))
    headers = JSON if content_length is None else JSON | {"content-length": content_length}
    async with make_client(FakeServer(SlowEngine())) as client:
        response = await client.post(COMPLETIONS, content=upload(), headers=headers)

    assert (response.status_code, response.headers["openai-processing-ms"]) == (200, "2000")


# -- over a socket -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/messages"])
async def test_a_client_that_sends_all_of_a_body_that_is_too_large_reads_the_refusal(
    path: str, is_chunked: bool
) -> None:
    piece, num_pieces = b"x" * 2**16, 20 * 16
    how = "transfer-encoding: chunked" if is_chunked else f"content-length: {20 * 2**20}"
    async with listening(FakeServer()) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{how}\r\n"
        writer.write(head.encode() + b"\r\n")
        for _ in range(num_pieces):
            writer.write(b"10000\r\n%s\r\n" % piece if is_chunked else piece)
            await writer.drain()  # raises if the server resets the connection
        writer.write(b"0\r\n\r\n" if is_chunked else b"")
        await writer.drain()
        answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert (
        b"larger than the 16777216 bytes allowed"
        in orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].encode()
    )


async def send(url: str, head: str, body: bytes = b"") -> bytes:
    """Send bytes and return the response until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n" + body)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


async def scraped(url: str) -> list[str]:
    async with httpx.AsyncClient(base_url=url) as client:
        return await refusals_of(client)


POST = f"POST {COMPLETIONS} HTTP/1.1\nhost: x\ncontent-type: application/json\n"


async def test_a_client_that_waits_to_be_asked_is_refused_at_once() -> None:
    async with listening(FakeServer()) as url:
        answer = await send(url, f"{POST}content-length: 20000000\nexpect: 100-continue\n")

    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.observes("limits.body_timeout_s")
async def test_half_a_body_is_waited_for_so_long_and_no_longer() -> None:
    server = FakeServer(config=make_server_config(limits={"body_timeout_s": 0.05}))
    async with listening(server) as url:
        head = f"{POST}content-length: 100\nconnection: close\n"
        answer = await send(url, head, b'{"prompt": ')
        counted = await scraped(url)

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert counted == ["body_timeout_s"]
    assert server.client.requests == []


async def test_headers_over_the_limit_are_told_so_on_the_wire() -> None:
    async with listening(FakeServer()) as url:
        filling = "v" * DEFAULTS.max_header_bytes
        answer = await send(url, f"{POST}x-a: {filling}\nconnection: close\ncontent-length: 0\n")
        counted = await scraped(url)

    assert answer.startswith(b"HTTP/1.1 431 ")
    assert counted == ["max_header_bytes"]


async def test_a_megabyte_of_headers_ends_the_connection() -> None:
    async with listening(FakeServer()) as url:
        with_headers = f"{POST}x-a: {'v' * 2**20}\n"
        try:
            answer = await send(url, with_headers)
        except ConnectionError:
            answer = b""

    assert answer == b"" or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))


@pytest.mark.observes("limits.stream_timeout_s")
async def test_a_reader_who_stops_reading_loses_the_stream() -> None:
    server = FakeServer(
        FakeEngine(text="a" * 100_000),
        plan=make_plan(max_model_len=10**6, num_pages=10**5),
        config=make_server_config(limits={"stream_timeout_s": 0.2}),
    )
    body = orjson.dumps({"prompt": "a", "max_tokens": 100_000, "stream": True})
    async with listening(server) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port, limit=2**10)
        writer.write(f"{POST}content-length: {len(body)}\n\n".replace("\n", "\r\n").encode() + body)
        async with asyncio.timeout(20):
            await server.client.gone.wait()
        counted = await scraped(url)
        writer.close()

    assert counted == ["stream_timeout_s"]
    assert server.client.running == set()
