"""The outermost layer: limits on URL and headers, request ids, and the last resort.

Plain ASGI, so that streams and cancellation pass through untouched.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remora.deployments.http.dialects import OPENAI, Dialect, dialect_of
from remora.deployments.http.errors import error_headers, log_error
from remora.deployments.http.wire import JSONAnswer, route_path

MAX_HEADERS, MAX_HEADER_BYTES, MAX_URL_BYTES = 100, 32 * 1024, 8 * 1024
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Edge:
    """ASGI middleware around the whole application.

    echo_request_id:  whether to send `x-request-id` back; Serve's proxy does so by itself
    count:            called with (route, status) for each response
    """

    def __init__(
        self, app: ASGIApp, *, echo_request_id: bool, count: Callable[[str, int], None]
    ) -> None:
        self._app = app
        self._echo_request_id = echo_request_id
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0
        started = time.perf_counter()

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["openai-processing-ms"] = f"{(time.perf_counter() - started) * 1000:.0f}"
                if self._echo_request_id:
                    headers["x-request-id"] = request_id
            await send(message)

        try:
            _check_limits(scope)
            await self._app(scope, receive, send_on)
        except Exception as error:
            # A boundary: nothing is left above that would answer in our shape.
            log_error(error, request_id)
            if status == 0:
                answer = error_answer(error, dialect_of(route_path(scope)))
                await answer(scope, receive, send_on)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._count(route, status or 499)


def error_answer(error: BaseException, dialect: Dialect = OPENAI) -> JSONAnswer:
    """Return the response to an error."""
    return JSONAnswer(dialect.error(error), dialect.status(error), error_headers(error))


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _check_limits(scope: Scope) -> None:
    headers = scope["headers"]
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_URL_BYTES:
        raise HTTPException(414, f"The URL is longer than {MAX_URL_BYTES} bytes.")
    num_bytes = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES:
        message = f"More than {MAX_HEADERS} headers, or {MAX_HEADER_BYTES} bytes of them."
        raise HTTPException(431, message)
