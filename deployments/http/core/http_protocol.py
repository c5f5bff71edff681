"""What uvicorn has no option for: heads that never end, trailers and extensions of chunks.

A client that sends a request's head byte by byte, or nothing, keeps its connection for ever. And
uvicorn with httptools appends the trailers of a chunked body to the list that the ASGI scope
already holds, so they would count as headers (API keys included) and grow without a limit.
Extensions of chunks are read and dropped without a limit, and no limit of bodies counts them.

Imports uvicorn only inside a function: the command line reads the limits and starts no HTTP server.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# For a whole head, from the connection or the head's first byte on.
HEAD_TIMEOUT_S = 20.0
# Of a connection's requests: what a chunked body has beyond its content, where each part of the
# content may come with as many bytes again and _CHUNK_BYTES: sizes and extensions of chunks,
# trailers.
MAX_FRAMING_BYTES = 16 * 1024
_CHUNK_BYTES = 16
# The start of a head and its end, without the URL; of a header, without name and value.
_HEAD_BYTES, _HEADER_BYTES = 32, 4


@dataclass(slots=True)
class _Framing:
    """Counts the bytes of a connection that were neither heads nor content."""

    num_bytes: int = 0

    def deduct(self, num_bytes: int) -> None:
        """Take off what was received as head or content, and what may come with it."""
        self.num_bytes = max(0, self.num_bytes - num_bytes)


def _refuse_framing(protocol: HttpToolsProtocol) -> None:
    if protocol.transport.is_closing():
        return
    if protocol.cycle is None or protocol.cycle.response_started:
        protocol.transport.close()  # nothing may follow a part of an answer
        return
    protocol.send_400_response(
        f"The body has more than {MAX_FRAMING_BYTES} bytes of chunk extensions and trailers; "
        "send none."
    )


def guard_connections() -> None:
    """Bound heads and chunks and drop trailers in HTTP servers that this process starts from now.

    uvicorn's default protocol is replaced with a subclass; its other one, h11, does so by itself.
    """
    try:
        from uvicorn.protocols.http import auto, httptools_impl
    except ImportError:  # httptools is not installed
        return

    class GuardedProtocol(httptools_impl.HttpToolsProtocol):
        """HttpToolsProtocol that closes connections without a head, and ignores trailers."""

        _is_in_body = False
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._framing = _Framing()
            super().connection_made(transport)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._framing.num_bytes += len(data)
            super().data_received(data)  # calls the methods below
            if self._is_in_body and self._framing.num_bytes > MAX_FRAMING_BYTES:
                _refuse_framing(self)

        def on_message_begin(self) -> None:
            self._is_in_body = False
            self._framing.deduct(_HEAD_BYTES)
            self._await_head()
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._framing.deduct(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self._is_in_body:
                self._framing.deduct(len(name) + len(value) + _HEADER_BYTES)
                super().on_header(name, value)

        def on_body(self, body: bytes) -> None:
            self._framing.deduct(2 * len(body) + _CHUNK_BYTES)
            super().on_body(body)

        def on_headers_complete(self) -> None:
            self._is_in_body = True
            self._stop_waiting()
            super().on_headers_complete()

        def _await_head(self) -> None:
            self._stop_waiting()
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

        def _stop_waiting(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _give_up(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    if auto.AutoHTTPProtocol is httptools_impl.HttpToolsProtocol:
        auto.AutoHTTPProtocol = GuardedProtocol
