"""OpenAI's paths without `/v1`, as clients send them whose base URL has no version.

The path is completed before anything else reads it, so a short path has no route of its own: keys,
limits, dialects, gateways and routing policies see the path under `/v1`.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from remora.deployments.http.core.wire import route_path

VERSION = "/v1"
# No API that this server speaks has a path of its own at or below these.
SHORT_PATHS = (
    "/batches",
    "/chat/completions",
    "/completions",
    "/embeddings",
    "/files",
    "/models",
    "/responses",
)


def full_path(path: str) -> str:
    """Return the path under `/v1` of a short path; any other path unchanged."""
    below = f"{path}/"
    is_short = any(below.startswith(f"{short}/") for short in SHORT_PATHS)
    return f"{VERSION}{path}" if is_short else path


class ShortPaths:
    """ASGI middleware that completes short paths."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] == "http":
            path = route_path(scope)
            if full_path(path) != path:
                scope = _with_version(scope, mount=scope["path"].removesuffix(path))
        await self._app(scope, receive, send)


def _with_version(scope: Scope, *, mount: str) -> Scope:
    raw: bytes | None = scope.get("raw_path")
    raw_mount = mount.encode("utf-8")
    if raw is not None and raw.startswith(raw_mount):
        raw = raw_mount + VERSION.encode() + raw.removeprefix(raw_mount)
    return {**scope, "path": mount + VERSION + scope["path"].removeprefix(mount), "raw_path": raw}
