"""Streams of frames (mostly server-sent events), and noticing that the client has gone.

Ray Serve cancels the handler when its client goes away; plain uvicorn only says so through
`receive`. Both ways end in the same place: what was generating is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from remora.deployments.http.core.body_limits import limit
from remora.deployments.http.core.errors import CLIENT_GONE, log_error
from remora.deployments.http.core.wire_formats import Dialect
from remora.deployments.scoped_task import scoped_task

KEEP_ALIVE_S = 15.0
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


async def while_connected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return what `work` returns; cancel it when the client goes away first."""
    async with scoped_task(work) as task, scoped_task(_until_disconnect(request.receive)) as gone:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(CLIENT_GONE, "The client closed the connection.")
        return task.result()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def as_events(
    chunks: AsyncGenerator[dict[str, Any], None], dialect: Dialect, request_id: str
) -> AsyncGenerator[bytes, None]:
    """Yield chunks as frames; an error becomes a frame too, since the status has been sent."""
    place = 0
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                place += 1
                yield dialect.frame(chunk)
    except Exception as error:
        # A boundary: past this point only the stream itself can tell the client.
        log_error(error, request_id)
        yield dialect.error_frame(error, place)
    if dialect.last:
        yield dialect.last


def _part(body: bytes, *, more_body: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


class EventStream(Response):
    """Sends frames as they come, a sign of life when none came for a while, and closes the source.

    close:  called once the stream has ended for whatever reason
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        dialect: Dialect,
        *,
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers}, media_type=dialect.media_type)
        del self.headers["content-length"]
        self._events = events
        self._keep_alive = dialect.keep_alive
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        wire = _Wire(send, self._keep_alive)
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with AsyncExitStack() as held:
            held.push_async_callback(self._close)
            held.push_async_callback(self._events.aclose)
            try:
                await send(start)
                await self._send_events(wire, receive)
            except TimeoutError:
                # A client that takes nothing for so long has given up its answer.
                log.warning("a client took nothing of its stream for %g s; closed", wire.stall_s)
                scope["state"]["count_refusal"]("stream_timeout_s")

    async def _send_events(self, wire: _Wire, receive: Receive) -> None:
        """Send all events, or those until the client leaves. Raises TimeoutError if it stalls."""
        async with (
            scoped_task(self._write(wire)) as writer,
            scoped_task(_until_disconnect(receive)) as gone,
        ):
            while not (writer.done() or gone.done()):
                await asyncio.wait(
                    {writer, gone}, timeout=wire.patience_s(), return_when=asyncio.FIRST_COMPLETED
                )
                if not writer.done():
                    await wire.keep_alive()
            if writer.done():
                writer.result()
                await wire.send_in_time(b"", more_body=False)

    async def _write(self, wire: _Wire) -> None:
        async for event in self._events:
            await wire.send(event)


class _Wire:
    """The way to the client, and how long ago something went through it.

    A timeout of its own for each event would cost as much as making the event; so whoever watches
    the stream looks, now and then, how long the event on the way has been there.
    """

    def __init__(self, send: Send, keep_alive: bytes) -> None:
        self._send = send
        self._keep_alive = keep_alive
        self.stall_s: float = limit("stream_timeout_s")
        self._time = asyncio.get_running_loop().time
        self._sent_at = self._time()
        self._sending_since: float | None = None

    async def send(self, body: bytes) -> None:
        """Send an event; returns once the client's side has room for more."""
        self._sending_since = self._time()
        await self._send(_part(body))
        self._sending_since = None
        self._sent_at = self._time()

    async def send_in_time(self, body: bytes, *, more_body: bool = True) -> None:
        """Send something while nobody watches. Raises TimeoutError after `stall_s`."""
        async with asyncio.timeout(self.stall_s):
            await self._send(_part(body, more_body=more_body))
        self._sent_at = self._time()

    def patience_s(self) -> float:
        """Return when to look again, at the latest."""
        if self._sending_since is not None:
            return self._sending_since + self.stall_s - self._time()
        if not self._keep_alive:
            return self.stall_s
        return min(self.stall_s, self._sent_at + KEEP_ALIVE_S - self._time())

    async def keep_alive(self) -> None:
        """Send a sign of life after a while of nothing. Raises TimeoutError if all is stuck."""
        now = self._time()
        if self._sending_since is not None:
            if now - self._sending_since >= self.stall_s:
                raise TimeoutError
        elif now - self._sent_at >= KEEP_ALIVE_S and self._keep_alive:
            await self.send_in_time(self._keep_alive)
