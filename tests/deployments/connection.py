"""One request to an application, as a server makes it; its client may leave or stop reading."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.types import ASGIApp, Message


class Connection:
    """One ASGI request whose client can disconnect.

    takes_bodies:  whether there is room for more once a part of a body has been sent
    """

    def __init__(self, app: ASGIApp, path: str, body: Any, *, takes_bodies: bool = True) -> None:
        self.sent: list[Message] = []
        self._takes_bodies = takes_bodies
        self._leaves = asyncio.Event()
        self._incoming: list[Message] = [{"type": "http.request", "body": orjson.dumps(body)}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "scheme": "http",
            "server": ("remora", 80),
            "client": ("client", 1),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._incoming:
            return self._incoming.pop(0)
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        if not self._takes_bodies and message["type"] == "http.response.body":
            await self._leaves.wait()

    def leave(self) -> None:
        self._leaves.set()
