"""The pages for browsers: the playground, the description of the API, and their files.

    GET /                        the playground, for clients that accept text/html; others get past
    GET /docs                    the API, as /openapi.json describes it, with forms to try it
    GET /playground/DIGEST/NAME  a file of these pages

A middleware instead of routes, for two reasons: the pages must open without an API key, since it is
where a person enters one, and `GET /` of clients that are not browsers has another answer. It
stands within `Edge`, which counts and limits these requests too, and in front of `Gate`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remora.configs.sections.api import ApiSection
from remora.deployments.http.core.wire import route_path
from remora.deployments.http.playground.static_files import StaticFile, static_files

FILES = "/playground/"
DOCS = "/docs"
OPENAPI = "/openapi.json"
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text becomes HTML, whatever the code does
        "trusted-types 'none'",
    )
)
_SECURITY_HEADERS = MappingProxyType(
    {
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
)
_FOREVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"


class Playground:
    """ASGI middleware that answers browsers with the pages.

    settings:  returns which of them are served now: `playground` and `docs`
    """

    def __init__(self, app: ASGIApp, *, settings: Callable[[], ApiSection]) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        path = route_path(scope)
        settings = self._settings()
        if path in (DOCS, OPENAPI) and not settings.docs:
            raise HTTPException(404)
        answer = _docs_answer(scope, path)
        is_on = settings.playground
        if answer is None and is_on:
            answer = _answer(scope, path)
        if answer is not None:
            # For the metrics: `Edge` counts responses by this path.
            is_file = path.startswith(FILES)
            scope["route"] = SimpleNamespace(path=f"{FILES}NAME" if is_file else _page_path(path))
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, _varying(send) if is_on and path == "/" else send)


def _page_path(path: str) -> str:
    return DOCS if path == DOCS else "/"


def _docs_answer(scope: Scope, path: str) -> Response | None:
    """Return the description of the API or a file; None = the request is for something else."""
    if path == DOCS:
        return _sent(static_files().docs, scope, {"cache-control": _ASK_AGAIN})
    if path.startswith(FILES):
        digest, _, name = path.removeprefix(FILES).partition("/")
        file = static_files().files.get(name)
        if file is None:
            return None
        # Another replica may still have, or already have, another version of the page.
        is_exact = digest == static_files().digest
        return _sent(file, scope, {"cache-control": _FOREVER if is_exact else _ASK_AGAIN})
    return None


def _answer(scope: Scope, path: str) -> Response | None:
    """Return the playground or a redirection; None = the request is for something else."""
    headers = Headers(scope=scope)
    if not _accepts_html(headers):
        return None
    if path == "/":
        return _sent(static_files().page, scope, {"cache-control": _ASK_AGAIN, "vary": "accept"})
    if path == str(scope.get("root_path", "")).rstrip("/"):
        # The mount point without its last slash, from which relative addresses would not resolve.
        return RedirectResponse(quote(path.rpartition("/")[2]) + "/", 308)
    return None


def _accepts_html(headers: Headers) -> bool:
    kinds = ",".join(headers.getlist("accept")).lower().split(",")
    return any(kind.partition(";")[0].strip() == "text/html" for kind in kinds)


def _sent(file: StaticFile, scope: Scope, headers: dict[str, str]) -> Response:
    """Return the response with a file, or 304 if the client has it."""
    headers = {**_SECURITY_HEADERS, **headers, "etag": file.etag}
    known = [
        tag.strip().removeprefix("W/")
        for line in Headers(scope=scope).getlist("if-none-match")
        for tag in line.split(",")
    ]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    headers |= {"content-type": file.media_type, "content-length": str(len(file.content))}
    return Response(b"" if scope["method"] == "HEAD" else file.content, headers=headers)


def _varying(send: Send) -> Send:
    """Return a `send` that tells caches of the page at the same address."""

    async def send_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).add_vary_header("accept")
        await send(message)

    return send_on
