"""The middleware in front of Serve's proxies: refusals and errors that no replica writes.

Serve answers some requests in plain text before they reach a replica (no replica, queue full,
timeout). This module turns such answers into error objects of the path's dialect; responses of
replicas pass through unchanged. Headers that Serve reads without a check of its own are checked
here.
"""

from __future__ import annotations

import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remora.configs.errors import InvalidRequest, RemoraError, Unavailable
from remora.deployments.http.core.edge import error_answer
from remora.deployments.http.core.errors import answer_to_status
from remora.deployments.http.core.http_protocol import guard_connections
from remora.deployments.http.core.serve_headers import TIMEOUT, check_serve_headers
from remora.deployments.http.core.wire import dumps
from remora.deployments.http.core.wire_formats import Dialect, dialect_of

_MAX_TEXT = 200
_NO_ROUTES = Unavailable(
    "No model is served: the server is starting or stopping. Please try again."
)

log = logging.getLogger(__name__)


class ProxyErrors:
    """ASGI middleware that refuses headers which Serve cannot read and rewrites plain errors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        try:
            check_serve_headers(scope.get("headers", ()))
        except InvalidRequest as error:
            await _refuse(error, scope, receive, send)
            return
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # By the path alone: this says nothing of applications mounted elsewhere than at /.
        dialect = dialect_of(scope["path"])
        held: Message | None = None
        has_answered = False
        text = b""

        async def send_on(message: Message) -> None:
            nonlocal held, has_answered, text
            if message["type"] == "http.response.start" and _is_plain_error(message):
                held = message
                return
            has_answered = True
            if held is None:
                await send(message)
                return
            text += message.get("body", b"")
            if not message.get("more_body"):
                if held["status"] == 404 and not await self._has_routes(scope):
                    await _answer_error(_NO_ROUTES, scope, receive, send)
                else:
                    await _send_shaped(held, _message(scope, text), send, dialect)

        # A replica that dies before it has sent anything ends in either way.
        try:
            await self._app(scope, receive, send_on)
        except Exception:
            if has_answered:
                raise
            log.exception("Serve's proxy failed")
        if not has_answered:
            error = Unavailable("No replica could answer. Please try again.")
            await _answer_error(error, scope, receive, send)

    async def _has_routes(self, scope: Scope) -> bool:
        """Return whether Serve's proxy has an application.

        A proxy that has just started does not know them yet, and one of a server that stops has
        none any more, while requests still run: both answer 404 to every path.
        """
        status, body = 0, b""

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, body
            status = message.get("status", status)
            body += message.get("body", b"")

        path = "/-/routes"
        asked = {**scope, "method": "GET", "path": path, "raw_path": path.encode(), "root_path": ""}
        await self._app(asked, receive, send)
        return status != 503 and body.strip() != b"{}"


async def _answer_error(error: RemoraError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer an error in the format of the path."""
    answer = error_answer(error, dialect_of(scope["path"]))
    answer.headers["x-request-id"] = uuid.uuid4().hex
    await answer(scope, receive, send)


async def _refuse(error: InvalidRequest, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await _answer_error(error, scope, receive, send)


def _is_plain_error(start: Message) -> bool:
    media_type = Headers(raw=start["headers"]).get("content-type", "text/plain")
    return start["status"] >= 400 and media_type.startswith("text/plain")


def _message(scope: Scope, text: bytes) -> str:
    message = text.decode("utf-8", "replace").strip() or "The request was refused."
    if "timed out after" not in message:
        return message
    # Serve names its own limit here, or "None", even if the request's header set another.
    own = float(Headers(scope=scope).get(TIMEOUT, "0"))
    limit = f"{own:g} s ({TIMEOUT})" if own > 0 else "the limit (http_options.request_timeout_s)"
    return f"The request took longer than {limit}."


async def _send_shaped(start: Message, message: str, send: Send, dialect: Dialect) -> None:
    answer = answer_to_status(start["status"])
    if answer.status >= 500 and answer.type == "server_error":
        # Serve puts tracebacks into these messages.
        message = "Something went wrong on our side; the server's log says more."
    body = dumps(dialect.error(HTTPException(answer.status, message[:_MAX_TEXT])))
    headers = MutableHeaders(raw=list(start["headers"]))
    headers.setdefault("x-request-id", uuid.uuid4().hex)
    headers["content-type"] = "application/json"
    headers["content-length"] = str(len(body))
    if answer.status in (429, 503):
        headers.setdefault("retry-after", "1")
        headers["x-should-retry"] = "true"
    await send({**start, "headers": headers.raw})
    await send({"type": "http.response.body", "body": body})


def middlewares() -> list[Middleware]:
    """Return the middlewares for Serve's proxy; the HTTP server that it starts drops trailers.

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH may also name this function as the callback.
    """
    guard_connections()
    return [Middleware(ProxyErrors)]
