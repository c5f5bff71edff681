"""Serve's own plain-text errors take our shape; everything else passes through."""

from __future__ import annotations

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from remora.deployments.http.proxy import ProxyErrors


async def through(response: ASGIApp) -> httpx.Response:
    transport = httpx.ASGITransport(app=ProxyErrors(response))
    async with httpx.AsyncClient(transport=transport, base_url="http://remora") as client:
        return await client.get("/")


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


async def test_the_wait_that_serve_gives_is_kept() -> None:
    response = await through(PlainTextResponse("Full", 503, headers={"retry-after": "7"}))
    assert response.headers["retry-after"] == "7"


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
