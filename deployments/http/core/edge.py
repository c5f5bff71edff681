"""The outermost middleware: limits of URL and headers, request ids, and unhandled errors.

Plain ASGI, so that it does not interfere with streams and cancellation.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remora.configs.sections.limits import LimitsSection
from remora.deployments.http.core.body_limits import OverLimit, apply
from remora.deployments.http.core.errors import error_headers, log_error
from remora.deployments.http.core.wire import (
    BODY_HAS_ENDED,
    JSONAnswer,
    TooLargeAnswer,
    route_path,
)
from remora.deployments.http.core.wire_formats import OPENAI, Dialect

TOO_LARGE = 413
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Edge:
    """ASGI middleware around the whole application.

    limits:           returns the current limits
    dialect_of:       returns the dialect of a path; the body may change it later
    echo_request_id:  whether to return `x-request-id`; Serve's proxy does so by itself
    count:            called with (route, status) for each response
    count_refusal:    called with the name of each limit that refused something; `refused` calls
                      it too
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Callable[[], LimitsSection],
        dialect_of: Callable[[str], Dialect],
        echo_request_id: bool,
        count: Callable[[str, int], None],
        count_refusal: Callable[[str], None],
    ) -> None:
        self._app = app
        self._limits = limits
        self._dialect_of = dialect_of
        self._echo_request_id = echo_request_id
        self._count = count
        self._count_refusal = count_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, dialect=self._dialect_of(route_path(scope)))
        state.update(count_refusal=self._count_refusal, send=send)
        status = 0
        started = time.perf_counter()

        async def receive_on() -> Message:
            nonlocal started
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                state[BODY_HAS_ENDED] = True
                started = time.perf_counter()  # the client's upload is not the server's time
            return message

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["openai-processing-ms"] = f"{(time.perf_counter() - started) * 1000:.0f}"
                if self._echo_request_id:
                    headers["x-request-id"] = request_id
                if id_header := state["dialect"].id_header:
                    headers[id_header] = request_id
            await send(message)

        try:
            limits = self._limits()
            apply(limits)
            _check_limits(scope, limits)
            await self._app(scope, receive_on, send_on)
        except Exception as error:
            # A boundary: no outer layer would answer in the API's format.
            if not (status and isinstance(error, ConnectionError)):  # otherwise the client has left
                log_error(error, request_id)
            refused(scope, error)
            if status == 0:
                answer = error_answer(error, state["dialect"], request_id)
                await answer(scope, receive_on, send_on)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._count(route, status or 499)


def error_answer(
    error: BaseException, dialect: Dialect = OPENAI, request_id: str = ""
) -> JSONAnswer:
    """Return the response for an error."""
    body, status = dialect.error_of(error, request_id), dialect.status(error)
    kind = TooLargeAnswer if status == TOO_LARGE else JSONAnswer
    return kind(body, status, error_headers(error))


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def refused(scope: Scope, error: BaseException) -> None:
    """Count an error if it is a refusal by a limit."""
    limit = getattr(error, "limit", None)
    if limit is not None:
        scope["state"]["count_refusal"](limit)


def _check_limits(scope: Scope, limits: LimitsSection) -> None:
    headers = scope["headers"]
    url_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    header_bytes = sum(len(name) + len(value) for name, value in headers)
    for status, key, found, what in (
        (414, "max_url_bytes", url_bytes, "bytes of URL; send them in the body"),
        (431, "max_headers", len(headers), "headers; send fewer"),
        (431, "max_header_bytes", header_bytes, "bytes of headers; send fewer"),
    ):
        allowed = getattr(limits, key)
        if found > allowed:
            message = f"The request has {found}, more than {allowed} {what}."
            raise OverLimit(status, message, key)
