"""The rules of errors, for every endpoint that generates text, in its dialect's format.

The same table runs with the application mounted below a prefix, as in Serve.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import httpx
import pytest

from remora.configs.errors import EngineError, QueueFull, RequestTimedOut, Unavailable
from tests.deployments.fakes import (
    FakeEngine,
    FakeServer,
    make_app,
    make_config,
    make_plan,
    methods_of,
    share_app,
)

TURNS = {"messages": [{"role": "user", "content": "Hi"}]}
MAX_BODY_BYTES = 2000
PREFIXES = ["", "/smol"]


def is_openai(body: Any) -> str:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


def is_anthropic(body: Any) -> str:
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return str(body["error"]["message"])


def is_ollama(body: Any) -> str:
    assert set(body) == {"error"}
    assert isinstance(body["error"], str)
    return body["error"]


def is_tgi(body: Any) -> str:
    assert set(body) == {"error", "error_type"}
    assert isinstance(body["error"], str)
    return body["error"]


def is_llamacpp(body: Any) -> str:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "type", "message", "param"}
    assert isinstance(body["error"]["code"], int)
    return str(body["error"]["message"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One path in one dialect.

    body:  a valid, streamed body; `text` names its field that holds the prompt
    """

    name: str
    path: str
    body: dict[str, Any]
    shape: Callable[[Any], str]
    text: str = "messages"
    dialect: str = "auto"

    def long(self) -> dict[str, Any]:
        """Return a body whose prompt is too long."""
        text = "x" * 1500
        turns = [{"role": "user", "content": text}]
        return self.body | {self.text: turns if self.text == "messages" else text}

    @property
    def is_tgi(self) -> bool:
        return self.shape is is_tgi


STREAM = {"stream": True, "model": "tiny"}
INPUTS = {"inputs": "x"}
ENDPOINTS = [
    Endpoint(name=f"{dialect} {path}", path=path, body=body | STREAM, shape=shape, text=text,
             dialect=dialect)
    for dialect, path, body, text, shape in (
        ("auto", "/v1/chat/completions", TURNS, "messages", is_openai),
        ("auto", "/v1/completions", {"prompt": "x"}, "prompt", is_openai),
        ("auto", "/v1/responses", {"input": "x"}, "input", is_openai),
        ("auto", "/v1/messages", TURNS | {"max_tokens": 9}, "messages", is_anthropic),
        ("auto", "/api/chat", TURNS, "messages", is_ollama),
        ("auto", "/api/generate", {"prompt": "x"}, "prompt", is_ollama),
        ("auto", "/completion", {"prompt": "x"}, "prompt", is_llamacpp),
        ("auto", "/generate", {"text": "x"}, "text", is_openai),
        ("sglang", "/generate", {"text": "x"}, "text", is_openai),
        ("tgi", "/generate", INPUTS, "inputs", is_tgi),
        ("tgi", "/generate_stream", INPUTS, "inputs", is_tgi),
        ("tgi", "/", INPUTS, "inputs", is_tgi),
        ("auto", "/generate_stream", INPUTS, "inputs", is_tgi),
        ("auto", "/", INPUTS, "inputs", is_tgi),
        ("sglang", "/", INPUTS, "inputs", is_tgi),
        ("lightllm", "/generate", INPUTS, "inputs", is_openai),
        ("lightllm", "/generate_stream", INPUTS, "inputs", is_openai),
        ("lightllm", "/", INPUTS, "inputs", is_openai),
    )
]  # fmt: skip

EACH = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)


def make_server(dialect: str, **engine: Any) -> FakeServer:
    return FakeServer(
        FakeEngine(**engine),
        config=make_config(generate_dialect=dialect, max_body_bytes=MAX_BODY_BYTES),
        plan=make_plan(max_model_len=200),
    )


def client_of(server: FakeServer, prefix: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(
        app=share_app(server), root_path=prefix, raise_app_exceptions=False
    )
    return httpx.AsyncClient(transport=transport, base_url=f"http://localhost{prefix}")


def check_error(endpoint: Endpoint, response: httpx.Response) -> str:
    """Check the format and headers of an error; return its message."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-should-retry"] in ("true", "false")
    assert response.headers["x-request-id"]
    message = endpoint.shape(response.json())
    assert 5 < len(message) < 700
    for inner in (r"\w+(Error|Exception)\b", r"Traceback", r"remora\.", r"/\w+/\w+", r" at 0x"):
        assert not re.search(inner, message), message
    return message


LONG_NAME = "a\x1b" + "y" * 900
FAULTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], int]] = {
    # body changes (None: the body is in the options), options of the request, status
    "no JSON": (None, {"content": b"{"}, 400),
    "no body": (None, {"content": b""}, 400),
    "a list": (None, {"json": []}, 400),
    **{
        f"raw {raw[:20]!r}": (None, {"content": raw}, 400)
        for raw in (
            *(b"   ", b"1", b"null", b'"text"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"\x00"),
            *(b'{"a": 1} trailing', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b'{"a": NaN}'),
            *(b'{"a": "\\udc00\\ud800"}', b'{"a": Infinity}', b'{"a": 1e999}'),
            *(b'{"a": ' + b"9" * 65 + b"}", b'{"a":' * 100 + b"1" + b"}" * 100, b"[" * 1500),
        )
    },
    "wrong media type": ({}, {"headers": {"content-type": "text/plain"}}, 415),
    "compressed": ({}, {"headers": {"content-encoding": "gzip"}}, 415),
    "too large": (None, {"content": b" " * (MAX_BODY_BYTES + 1)}, 413),
    "many headers": ({}, {"headers": {f"x-{number}": "1" for number in range(150)}}, 431),
    "large headers": ({}, {"headers": {"x-large": "1" * 40_000}}, 431),
    "long URL": ({}, {"params": {"x": "y" * 9000}}, 414),
    "unknown model": ({"model": LONG_NAME}, {}, 404),
    "model of a wrong type": ({"model": 7}, {}, 400),
    "stream of a wrong type": ({"stream": "yes"}, {}, 400),
}


@pytest.mark.parametrize("prefix", PREFIXES)
@EACH
async def test_a_fault_has_its_status_and_its_dialects_shape(
    endpoint: Endpoint, prefix: str
) -> None:
    server = make_server(endpoint.dialect)
    async with client_of(server, prefix) as client:
        for fault, (changes, options, status) in FAULTS.items():
            body = {} if changes is None else {"json": endpoint.body | changes}
            response = await client.post(endpoint.path, **(body | options))

            expected = 422 if endpoint.is_tgi and status == 400 else status
            assert response.status_code == expected, f"{fault}: {response.text}"
            message = check_error(endpoint, response)
            assert LONG_NAME[:200] not in message
            assert "\x1b" not in message
    assert not server.client.requests


@pytest.mark.parametrize("prefix", PREFIXES)
@EACH
async def test_a_wrong_method_is_told_the_right_ones(endpoint: Endpoint, prefix: str) -> None:
    async with client_of(make_server(endpoint.dialect), prefix) as client:
        response = await client.delete(endpoint.path)

    assert response.status_code == 405
    check_error(endpoint, response)
    allowed = {name.strip() for name in response.headers["allow"].split(",")}
    others = {
        "/generate": {"GET", "PUT"},
        "/": {"GET", "HEAD"},
        "/v1/chat/completions": {"GET"},
    }.get(endpoint.path, set())
    assert allowed == {"POST"} | others


ENGINE_FAULTS: list[tuple[Exception, int, str | None]] = [
    (QueueFull("The queue is full.", 2.5), 429, "3"),
    (Unavailable("Loading.", 1.0), 503, "1"),
    (RequestTimedOut("Too slow."), 504, None),
    (EngineError("at /secret/place"), 503, "1"),
    (RuntimeError("at /secret/place"), 500, None),
]


@EACH
async def test_what_goes_wrong_before_the_first_token_is_a_status(endpoint: Endpoint) -> None:
    server = make_server(endpoint.dialect)
    async with client_of(server) as client:
        for (error, status, retry_after), stream in product(ENGINE_FAULTS, (True, False)):
            server.client.error = error
            response = await client.post(endpoint.path, json=endpoint.body | {"stream": stream})

            assert (response.status_code, stream) == (status, stream), response.text
            assert response.headers.get("retry-after") == retry_after
            check_error(endpoint, response)


@EACH
async def test_a_prompt_too_long_for_a_stream_is_a_status(endpoint: Endpoint) -> None:
    async with client_of(make_server(endpoint.dialect)) as client:
        response = await client.post(endpoint.path, json=endpoint.long())

    assert response.status_code == (422 if endpoint.is_tgi else 400)
    assert "200 tokens" in check_error(endpoint, response)


@pytest.mark.parametrize("prefix", PREFIXES)
@EACH
async def test_a_right_body_is_answered_whole_and_streamed(endpoint: Endpoint, prefix: str) -> None:
    async with client_of(make_server(endpoint.dialect), prefix) as client:
        whole = await client.post(endpoint.path, json=endpoint.body | {"stream": False})
        stream = await client.post(endpoint.path, json=endpoint.body)

    assert (whole.status_code, stream.status_code) == (200, 200), whole.text
    assert "Paris." in whole.text or endpoint.path == "/generate_stream"
    assert "P" in stream.text


@EACH
async def test_a_body_that_does_not_arrive_is_a_408(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(endpoint.dialect)
    limits = server.config.limits.model_copy(update={"body_timeout_s": 0.01})
    server.config = server.config.model_copy(update={"limits": limits})

    async def pieces() -> Any:
        yield b"{"
        await asyncio.sleep(5)

    async with client_of(server) as client:
        response = await client.post(endpoint.path, content=pieces())
    assert response.status_code == 408
    check_error(endpoint, response)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/nowhere", is_openai),
        ("/v1/nowhere", is_openai),
        ("/v1/chat/completions/x", is_openai),
        ("/v1/responses/x/y", is_openai),
        ("/v1/messages/x", is_anthropic),
        ("/api", is_ollama),
        ("/api/nowhere", is_ollama),
        ("/apinowhere", is_openai),
        ("/%2e%2e/%2e%2e/etc/passwd", is_openai),
        ("/" + "y" * 5000, is_openai),
    ],
)
@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_path_that_is_not_there_is_a_404(
    path: str, shape: Callable[[Any], str], prefix: str
) -> None:
    async with client_of(make_server("auto"), prefix) as client:
        responses = [await client.request(method, path) for method in ("GET", "POST", "DELETE")]
    for response in responses:
        assert response.status_code == 404
        assert "y" * 201 not in shape(response.json())


# Paths that are also an id of a longer list of paths.
ALSO = {
    "/v1/chat/completions/batch": "/v1/chat/completions/{chat_id}",
    "/v1/responses/compact": "/v1/responses/{response_id}",
    "/v1/responses/input_tokens": "/v1/responses/{response_id}",
}


async def test_every_path_tells_the_methods_that_it_takes() -> None:
    paths = methods_of(make_app())
    assert len(paths) > 40
    async with client_of(make_server("auto")) as client:
        for path, methods in paths.items():
            response = await client.request("BREW", path)

            assert response.status_code == 405, path
            allowed = {name.strip() for name in response.headers["allow"].split(",")}
            assert allowed == methods | paths.get(ALSO.get(path, ""), set()), path
