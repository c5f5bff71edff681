"""Serve's plain-text errors are converted to remora's format; other responses are unchanged."""

from __future__ import annotations

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remora.deployments.http.core.serve_proxy import ProxyErrors


async def through(
    response: ASGIApp, path: str = "/v1/completions", *headers: tuple[bytes, bytes]
) -> httpx.Response:
    transport = httpx.ASGITransport(app=ProxyErrors(response))
    async with httpx.AsyncClient(transport=transport, base_url="http://remora") as client:
        return await client.get(path, headers=list(headers))


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (404, "not_found_error", "not_found"),
        (408, "timeout_error", "timeout"),
        (429, "rate_limit_error", "queue_full"),
        (503, "overloaded_error", "unavailable"),
    ],
)
async def test_plain_errors_are_wrapped(status: int, kind: str, code: str) -> None:
    response = await through(PlainTextResponse("No room.", status))

    assert response.status_code == status
    assert response.json()["error"] == {
        "message": "No room.",
        "type": kind,
        "param": None,
        "code": code,
    }
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_a_plain_error_takes_the_shape_of_its_path() -> None:
    anthropic = await through(PlainTextResponse("No room.", 503), "/v1/messages")
    ollama = await through(PlainTextResponse("No room.", 503), "/api/chat")

    assert anthropic.json()["error"] == {"type": "overloaded_error", "message": "No room."}
    assert ollama.json() == {"error": "No room."}


@pytest.mark.parametrize(
    ("routes", "status"),
    [
        (JSONResponse({"/": "remora"}), 404),
        (JSONResponse({}), 503),  # the server stops, while requests still run
        (PlainTextResponse("Route table is not populated yet.", 503), 503),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/chat"])
async def test_a_proxy_without_routes_says_so_instead_of_not_found(
    routes: ASGIApp, status: int, path: str
) -> None:
    async def serves(scope: Scope, receive: Receive, send: Send) -> None:
        is_asked = scope["path"] == "/-/routes"
        await (routes if is_asked else PlainTextResponse("Not here.", 404))(scope, receive, send)

    response = await through(serves, path)

    assert response.status_code == status
    assert response.headers["x-request-id"]
    is_retriable = status == 503
    assert response.headers.get("x-should-retry") == ("true" if is_retriable else None)
    assert response.headers.get("retry-after") == ("1" if is_retriable else None)
    error = response.json()["error"]
    assert ("starting or stopping" in str(error)) == is_retriable
    assert isinstance(error, str) == (path == "/api/chat")
    assert ("request_id" in response.json(), response.json().get("type")) == (
        (False, "error") if path == "/v1/messages" else (False, None)
    )


async def test_the_wait_that_serve_gives_is_kept() -> None:
    response = await through(PlainTextResponse("Full", 503, headers={"retry-after": "7"}))
    assert response.headers["retry-after"] == "7"


@pytest.mark.parametrize(
    ("headers", "limit"),
    [([], "http_options.request_timeout_s"), ([(b"x-request-timeout-seconds", b"0.50")], "0.5 s")],
)
async def test_a_timeout_of_serve_names_the_limit(
    headers: list[tuple[bytes, bytes]], limit: str
) -> None:
    text = PlainTextResponse("Request 5 timed out after Nones.", 408)
    response = await through(text, "/v1/completions", *headers)

    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (408, "timeout")
    assert "None" not in error["message"]
    assert limit in error["message"]


async def test_a_traceback_is_left_out() -> None:
    response = await through(PlainTextResponse("Traceback: /secret", 500))
    assert response.status_code == 500
    assert "secret" not in response.text


async def test_errors_of_replicas_and_good_answers_pass_through() -> None:
    pieces = (piece for piece in ["data: 1\n\n", "data: 2\n\n"])
    stream = await through(StreamingResponse(pieces, media_type="text/event-stream"))
    error = await through(JSONResponse({"error": "x"}, 400))
    text = await through(PlainTextResponse("fine"))

    assert stream.text == "data: 1\n\ndata: 2\n\n"
    assert error.json() == {"error": "x"}
    assert text.text == "fine"


async def test_a_failure_before_the_start_becomes_an_error_that_may_be_tried_again() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("the replica has died")

    response = await through(failing)

    assert response.status_code == 503
    assert response.json()["error"]["type"] == "overloaded_error"
    assert response.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("begins", [False, True])
async def test_an_answer_that_never_comes_becomes_an_error_that_may_be_tried_again(
    begins: bool,
) -> None:
    async def ends(scope: Scope, receive: Receive, send: Send) -> None:
        if begins:
            await send({"type": "http.response.start", "status": 503, "headers": []})

    response = await through(ends)

    assert response.status_code == 503
    assert response.json()["error"]["type"] == "overloaded_error"
    assert response.headers["x-should-retry"] == "true"


async def reads_headers(scope: Scope, receive: Receive, send: Send) -> None:
    """Decode headers as Serve's proxies do."""
    for name, value in scope["headers"]:
        (name.decode(), value.decode())
    await PlainTextResponse("read")(scope, receive, send)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in (
                b"x-request-id",
                b"X-Request-Timeout-Seconds",
                b"x-request-disconnect-disabled",
                b"serve_multiplexed_model_id",
                b"serve-multiplexed-model-id",
                b"x-session-id",
                b"x_session_id",
                b"traceparent",
            )
            for value in (b"\xff", b"a\xc3", b"\xed\xa0\x80", b"a\x1b[2J", b"a\x7f")
        ),
        (b"x-request-timeout-seconds", b"soon"),
        (b"x-request-timeout-seconds", b"nan"),
        (b"x-request-timeout-seconds", b"inf"),
        (b"x-request-disconnect-disabled", b"true"),
    ],
)
async def test_headers_that_serve_cannot_read_are_refused(name: bytes, value: bytes) -> None:
    response = await through(reads_headers, "/v1/completions", (name, value))

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name.decode().lower())
    assert "Allowed: " in error["message"]
    assert error["message"].isascii()
    assert error["message"].isprintable()
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"x-request-id", "Zoë 1".encode()),
        (b"x-session-id", "東京\u30001".encode()),
        (b"serve_multiplexed_model_id", b""),
        (b"x-request-timeout-seconds", b"-1"),
        (b"x-request-timeout-seconds", b"2.5"),
        (b"x-request-disconnect-disabled", b"?1"),
    ],
)
async def test_headers_that_serve_can_read_pass(name: bytes, value: bytes) -> None:
    response = await through(reads_headers, "/v1/completions", (name, value))
    assert response.text == "read"


async def test_a_websocket_with_such_headers_is_closed() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/", "headers": [(b"x-session-id", b"\xff")]}
    await ProxyErrors(reads_headers)(scope, receive, send)

    assert [message["type"] for message in sent] == ["websocket.close"]
