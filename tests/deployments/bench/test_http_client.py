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


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64, 100_000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_stream_reads_alike_however_it_is_cut(
    make_openai: MakeOpenAI, piece: int, end: str
) -> None:
    answer = (200, "text/event-stream", completion_events(5, end=end))
    server = make_openai(piece=piece, answer=lambda _path, _body: answer)

    reply = ask(server)

    assert reply.error is None
    assert reply.is_done
    assert len(reply.stamps_s) == 5
    assert reply.stamps_s == sorted(reply.stamps_s)
    assert reply.finish_reason == "length"
    assert reply.usage == {"prompt_tokens": 7, "completion_tokens": 5}


def test_a_refusal_is_told_in_the_server_s_words(make_openai: MakeOpenAI) -> None:
    reply = ask(make_openai(), "/v1/nothing")

    assert reply.refusal() == "HTTP 404: no such path"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"message": "too long"}', "too long"),
        (b"<html>busy</html>", "<html>busy</html>"),
        (b"", "no reason given"),
    ],
)
def test_refusals_of_other_shapes_are_understood(
    make_openai: MakeOpenAI, body: bytes, told: str
) -> None:
    server = make_openai(answer=lambda _path, _body: (503, "application/json", body))

    assert ask(server).refusal() == f"HTTP 503: {told}"


def test_an_error_in_the_middle_of_a_stream_is_an_error(make_openai: MakeOpenAI) -> None:
    content = events({"choices": [{"text": "a"}]}, {"error": {"message": "out of memory"}})
    server = make_openai(answer=lambda _path, _body: (200, "text/event-stream", content))

    assert ask(server).error == "out of memory"


def test_a_connection_that_breaks_is_an_error(make_openai: MakeOpenAI) -> None:
    reply = ask(make_openai(piece=16, cut_after=64))

    assert reply.error is not None
    assert "broke off" in reply.error


def test_a_stream_that_never_says_done_is_an_error(make_openai: MakeOpenAI) -> None:
    content = events({"choices": [{"text": "a"}]}, done=False)
    server = make_openai(answer=lambda _path, _body: (200, "text/event-stream", content))

    assert ask(server).error == "the stream ended without [DONE]"


@pytest.mark.parametrize("payload", ["{broken", "[1]", '{"choices": [3]}'])
def test_an_event_of_another_kind_is_an_error_and_no_crash(
    make_openai: MakeOpenAI, payload: str
) -> None:
    content = f"data: {payload}\n\ndata: [DONE]\n\n".encode()
    server = make_openai(answer=lambda _path, _body: (200, "text/event-stream", content))

    error = ask(server).error

    assert error is not None
    assert "not what OpenAI sends" in error


def test_comments_and_the_role_of_a_chat_are_no_tokens(make_openai: MakeOpenAI) -> None:
    content = b": keep-alive\n\n" + events(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    )
    server = make_openai(answer=lambda _path, _body: (200, "text/event-stream", content))

    assert len(ask(server).stamps_s) == 2


def test_nobody_there_is_an_os_error() -> None:
    with pytest.raises(OSError, match="Connect call failed"):
        asyncio.run(exchange(Endpoint(host="127.0.0.1", port=9), "GET", "/"))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(Failure, match="not an address"):
        parse_url(url)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://127.0.0.1:8000/v1/", Endpoint(host="127.0.0.1", port=8000)),
        ("http://[::1]:9/llm/v1", Endpoint(host="::1", port=9, prefix="/llm")),
        ("https://api.example", Endpoint(host="api.example", port=443, is_tls=True)),
    ],
)
def test_addresses_are_understood(url: str, endpoint: Endpoint) -> None:
    assert parse_url(url) == endpoint
