"""What uvicorn has no option for: heads that never end, and trailers that count as headers.

A client that sends a request's head byte by byte, or nothing, keeps its connection for ever. And
uvicorn with httptools appends the trailers of a chunked body to the list that the ASGI scope
already holds, so they would count as headers (API keys included) and grow without a limit.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http import auto

# For a whole head, from the connection or the head's first byte on.
HEAD_TIMEOUT_S = 20.0


def guard_connections() -> None:
    """Bound heads and drop trailers in the HTTP servers that this process starts from now on.

    uvicorn's default protocol is replaced with a subclass. Its other protocol, h11, drops trailers
    by itself and waits for heads.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:  # httptools is not installed
        return

    class GuardedProtocol(HttpToolsProtocol):
        """HttpToolsProtocol that closes connections without a head, and ignores trailers."""

        _is_in_body = False
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._is_in_body = False
            self._await_head()
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self._is_in_body:
                super().on_header(name, value)

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

    if auto.AutoHTTPProtocol is HttpToolsProtocol:
        auto.AutoHTTPProtocol = GuardedProtocol
