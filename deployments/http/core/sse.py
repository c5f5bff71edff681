"""Streams of frames (mostly server-sent events), and client disconnects.

Ray Serve cancels the handler when its client disconnects; uvicorn only sends a message through
`receive`. Either way the outputs are closed, which aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from remora.deployments.http.core.body_limits import limit
from remora.deployments.http.core.errors import CLIENT_GONE, log_error
from remora.deployments.http.core.wire import dumps
from remora.deployments.http.core.wire_formats import Dialect
from remora.deployments.scoped_task import scoped_task
from remora.engine.types import Output

Chunk = dict[str, Any]
Frame = Callable[[Mapping[str, Any]], bytes]

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


async def while_connected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the result of `work`; cancel it if the client disconnects first."""
    async with scoped_task(work) as task, scoped_task(_until_disconnect(request.receive)) as gone:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(CLIENT_GONE, "The client closed the connection.")
        return task.result()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ChunkWriter:
    """Writer of one streamed reply as chunks of its API. Used once.

    num_chunks:  chunks written so far; some dialects number late errors with it
    """

    num_chunks = 0

    def begin(self) -> Sequence[Chunk]:
        """Return the chunks before the first output."""
        return ()

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the chunks of one output of a prompt."""
        raise NotImplementedError

    async def end(self) -> Sequence[Chunk]:
        """Return the chunks after the last output."""
        return ()

    def fail(self, error: Exception) -> Sequence[Chunk]:
        """Return the chunks before the error that ends the stream."""
        return ()

    def close(self) -> None:
        """Release the resources of the stream. Called once after `begin`, however it ends."""

    def framed(self, frame: Frame) -> Callable[[int, Output], bytes]:
        """Return a variant of `chunks` that returns bytes; a writer may have a faster one."""

        def write(prompt: int, output: Output) -> bytes:
            return self.joined(self.chunks(prompt, output), frame)

        return write

    def joined(self, chunks: Sequence[Chunk], frame: Frame) -> bytes:
        """Return the frames of chunks, and count the chunks as written."""
        self.num_chunks += len(chunks)
        return b"".join(map(frame, chunks))


class TextFrame:
    """The frame of a chunk in which only one text changes. Only that text is encoded.

    chunk:  makes the chunk of a text
    """

    _MARK = secrets.token_hex(16)

    def __init__(self, chunk: Callable[[str], Chunk], frame: Frame) -> None:
        self._parts = frame(chunk(self._MARK)).split(dumps(self._MARK))

    def of(self, text: str) -> bytes:
        """Return the frame with this text: the same bytes as `frame(chunk(text))`."""
        return dumps(text).join(self._parts)


class EventStream(Response):
    """Response that sends the chunks of a stream as they are written, and keep-alives in pauses.

    outputs:  (index of the prompt, output); always closed when the stream ends
    """

    def __init__(
        self,
        outputs: AsyncGenerator[tuple[int, Output], None],
        writer: ChunkWriter,
        dialect: Dialect,
        *,
        request_id: str,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers}, media_type=dialect.media_type)
        del self.headers["content-length"]
        self._outputs = outputs
        self._writer = writer
        self._dialect = dialect
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        # Middlewares read only the start; past them, a body message costs a third less.
        wire = _Wire(scope["state"].get("send", send), self._dialect.keep_alive)
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with AsyncExitStack() as held:
            held.push_async_callback(self._outputs.aclose)
            try:
                await send(start)
                await self._send_events(wire, receive)
            except TimeoutError:
                log.warning("stream: closed, the client read nothing for %g s", wire.stall_s)
                scope["state"]["count_refusal"]("stream_timeout_s")

    async def _send_events(self, wire: _Wire, receive: Receive) -> None:
        """Send events until the end or a disconnect. Raises TimeoutError if the client stalls."""
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
        """Send all frames; the writer is closed before the client sees the stream's end."""
        try:
            await self._write_chunks(wire)
        finally:
            self._writer.close()
        if self._dialect.last:
            await wire.send(self._dialect.last)

    async def _write_chunks(self, wire: _Wire) -> None:
        """Send all chunks. An error becomes a frame too, since the status has been sent."""
        dialect, writer = self._dialect, self._writer
        write, send, next_output = writer.framed(dialect.frame), wire.send, self._outputs.__anext__
        has_ended = False
        try:
            body = writer.joined(writer.begin(), dialect.frame)
        except Exception as error:
            # A boundary, as below: after the status only the stream itself can report an error.
            body, has_ended = self._failed(error), True
        while True:
            if body:
                await send(body)
            if has_ended:
                break
            try:
                prompt, output = await next_output()
                body = write(prompt, output)
            except StopAsyncIteration:
                body, has_ended = await self._ending(), True
            except Exception as error:
                # A boundary, as above.
                body, has_ended = self._failed(error), True

    async def _ending(self) -> bytes:
        try:
            return self._writer.joined(await self._writer.end(), self._dialect.frame)
        except Exception as error:
            # A boundary, as in `_write_chunks`.
            return self._failed(error)

    def _failed(self, error: Exception) -> bytes:
        log_error(error, self._request_id)
        written = self._writer.joined(self._writer.fail(error), self._dialect.frame)
        return written + self._dialect.error_frame(error, self._writer.num_chunks)


class _Wire:
    """The connection to the client, and the time of the last send.

    A timeout for each event would cost as much as writing the event, so the task that watches the
    stream checks periodically how long the current send has taken.
    """

    def __init__(self, send: Send, keep_alive: bytes) -> None:
        self._send = send
        self._keep_alive = keep_alive
        self.stall_s: float = limit("stream_timeout_s")
        self._keep_alive_s: float | None = limit("keep_alive_s")
        self._sent_at = time.monotonic()  # begin of the last send
        self._is_sending = False

    async def send(self, body: bytes) -> None:
        """Send an event; return once the client's side has room for more."""
        self._sent_at = time.monotonic()
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self._is_sending = False

    async def send_in_time(self, body: bytes, *, more_body: bool = True) -> None:
        """Send outside the watched task. Raises TimeoutError after `stall_s`."""
        self._sent_at = time.monotonic()
        async with asyncio.timeout(self.stall_s):
            await self._send({"type": "http.response.body", "body": body, "more_body": more_body})

    def patience_s(self) -> float:
        """Return the longest time in seconds until the next check."""
        if self._is_sending:
            return self._sent_at + self.stall_s - time.monotonic()
        if not self._keep_alive or self._keep_alive_s is None:
            return self.stall_s
        return min(self.stall_s, self._sent_at + self._keep_alive_s - time.monotonic())

    async def keep_alive(self) -> None:
        """Send a keep-alive if one is due. Raises TimeoutError if an event is stuck."""
        now = time.monotonic()
        if self._is_sending:
            if now - self._sent_at >= self.stall_s:
                raise TimeoutError
        elif self._is_silent(now):
            await self.send_in_time(self._keep_alive)

    def _is_silent(self, now: float) -> bool:
        """Return whether a keep-alive is due."""
        period_s = self._keep_alive_s if self._keep_alive else None
        return period_s is not None and now - self._sent_at >= period_s
