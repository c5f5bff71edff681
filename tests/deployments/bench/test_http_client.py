"""The streaming client, against a real socket and every way of cutting a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from remora.deployments.bench.http_client import Endpoint, Reply, exchange, parse_url
from remora.deployments.cli.terminal import Failure
from tests.deployments.bench.openai_server import FakeOpenAI, completion_events, events

MakeOpenAI = Callable[..., FakeOpenAI]


def ask(server: FakeOpenAI, path: str = "/v1/completions", tokens: int = 4) -> Reply:
    return asyncio.run(exchange(parse_url(server.url), "POST", path, {"max_tokens": tokens}))


def streamed(make_openai: MakeOpenAI, content: bytes, **settings: int) -> Reply:
    answer = (200, "text/event-stream", content)
    return ask(make_openai(answer=lambda _path, _body: answer, **settings))


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64, 100_000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_stream_reads_alike_however_it_is_cut(
    make_openai: MakeOpenAI, piece: int, end: str
) -> None:
    reply = streamed(make_openai, completion_events(5, end=end), piece=piece)

    assert reply.error is None
    assert reply.is_done
    assert len(reply.stamps_s) == 5
    assert reply.stamps_s == sorted(reply.stamps_s)
    assert reply.finish_reason == "length"
    assert reply.usage == {"prompt_tokens": 7, "completion_tokens": 5}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no such path"}}', "no such path"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"message": "too long"}', "too long"),
        (b"<html>busy</html>", "<html>busy</html>"),
        (b"", "no reason given"),
    ],
)
def test_the_message_of_a_refusal(make_openai: MakeOpenAI, body: bytes, message: str) -> None:
    server = make_openai(answer=lambda _path, _body: (503, "application/json", body))

    assert ask(server).refusal() == f"HTTP 503: {message}"


@pytest.mark.parametrize(
    ("content", "settings", "error"),
    [
        (events({"choices": []}, {"error": {"message": "out of memory"}}), {}, "out of memory"),
        (events({"choices": [{"text": "a"}]}, done=False), {}, "[DONE]"),
        (completion_events(4), {"piece": 16, "cut_after": 64}, "lost"),
        *(
            (f"data: {payload}\n\ndata: [DONE]\n\n".encode(), {}, "malformed event")
            for payload in ("{broken", "[1]", '{"choices": [3]}')
        ),
    ],
)
def test_an_incomplete_or_malformed_stream_is_an_error(
    make_openai: MakeOpenAI, content: bytes, settings: dict[str, int], error: str
) -> None:
    assert error in (streamed(make_openai, content, **settings).error or "")


def test_comments_and_the_role_of_a_chat_are_no_tokens(make_openai: MakeOpenAI) -> None:
    content = b": keep-alive\n\n" + events(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    )

    assert len(streamed(make_openai, content).stamps_s) == 2


def test_a_refused_connection_is_an_os_error() -> None:
    with pytest.raises(OSError, match="Connect call failed"):
        asyncio.run(exchange(Endpoint(host="127.0.0.1", port=9), "GET", "/"))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(Failure, match="http://HOST:PORT"):
        parse_url(url)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://127.0.0.1:8000/v1/", Endpoint(host="127.0.0.1", port=8000)),
        ("http://[::1]:9/llm/v1", Endpoint(host="::1", port=9, prefix="/llm")),
        ("https://api.example", Endpoint(host="api.example", port=443, is_tls=True)),
    ],
)
def test_addresses(url: str, endpoint: Endpoint) -> None:
    assert parse_url(url) == endpoint
