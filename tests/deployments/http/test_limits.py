"""Limits of HTTP itself: the last value that is taken, and the first that is not."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import httpx
import pytest

from remora.deployments.http import wire
from remora.deployments.http.edge import MAX_HEADER_BYTES, MAX_HEADERS, MAX_URL_BYTES
from tests.deployments.fakes import FakeServer, make_app, make_client, make_config

PATH = "/v1/completions"
MAX_BODY_BYTES = 1000


async def status_of(url: str, headers: list[tuple[bytes, bytes]]) -> int:
    """Ask with exactly these headers."""
    transport = httpx.ASGITransport(app=make_app())
    request = httpx.Request("GET", f"http://remora{url}")
    request.headers = httpx.Headers(headers)
    response = await transport.handle_async_request(request)
    return response.status_code


@pytest.mark.parametrize(("excess", "status"), [(0, 200), (1, 414)])
async def test_the_length_of_a_url(excess: int, status: int) -> None:
    path = "/v1/models?"
    # The question mark belongs to neither part.
    filling = "x" * (MAX_URL_BYTES - len(path) + 1 + excess)
    assert await status_of(path + filling, []) == status


@pytest.mark.parametrize(("excess", "status"), [(0, 200), (1, 431)])
async def test_the_number_of_headers(excess: int, status: int) -> None:
    headers = [(b"x-%d" % number, b"") for number in range(MAX_HEADERS + excess)]
    assert await status_of("/v1/models", headers) == status


@pytest.mark.parametrize(("excess", "status"), [(0, 200), (1, 431)])
async def test_the_bytes_of_headers(excess: int, status: int) -> None:
    headers = [(b"x-a", b"v" * (MAX_HEADER_BYTES - 3 + excess))]
    assert await status_of("/v1/models", headers) == status


def make_body(num_bytes: int) -> bytes:
    head, tail = b'{"prompt": "', b'", "max_tokens": 1}'
    return head + b"x" * (num_bytes - len(head) - len(tail)) + tail


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(("excess", "status"), [(0, 200), (1, 413)])
async def test_the_length_of_a_body(excess: int, status: int, declared: bool) -> None:
    body = make_body(MAX_BODY_BYTES + excess)

    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    server = FakeServer(config=make_config(max_body_bytes=MAX_BODY_BYTES))
    async with make_client(server) as client:
        headers = {"content-type": "application/json"}
        content = body if declared else pieces()
        response = await client.post(PATH, content=content, headers=headers)
    assert response.status_code == status


async def test_a_body_that_declares_an_absurd_length_is_refused_unread() -> None:
    pieces_read = []

    async def unread() -> AsyncGenerator[bytes, None]:
        pieces_read.append(b"")
        yield b""

    async with make_client() as client:
        headers = {"content-type": "application/json", "content-length": "9" * 30}
        response = await client.post(PATH, content=unread(), headers=headers)
    assert (response.status_code, pieces_read) == (413, [])


async def post_extra(value: bytes) -> int:
    async with make_client() as client:
        body = b'{"prompt": "a", "max_tokens": 1, "extra": ' + value + b"}"
        headers = {"content-type": "application/json"}
        return (await client.post(PATH, content=body, headers=headers)).status_code


@pytest.mark.parametrize(("excess", "status"), [(0, 200), (1, 400)])
async def test_the_depth_of_a_body(excess: int, status: int) -> None:
    depth = wire.MAX_DEPTH - 1 + excess  # the body itself is a level
    assert await post_extra(b"[" * depth + b"]" * depth) == status
    assert await post_extra(b'{"a":' * depth + b"1" + b"}" * depth) == status


@pytest.mark.parametrize(("num_digits", "status"), [(64, 200), (65, 400)])
async def test_the_digits_of_a_number(num_digits: int, status: int) -> None:
    assert await post_extra(b"9" * num_digits) == status
    assert await post_extra(b"-" + b"9" * num_digits) == status


async def test_digits_within_a_text_are_text() -> None:
    assert await post_extra(b'"' + b"9" * 1000 + b'"') == 200


async def test_depth_beyond_all_measure_is_refused() -> None:
    assert await post_extra(b"[" * 100_000 + b"]" * 100_000) == 400
