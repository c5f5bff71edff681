"""A TCP proxy on loopback that cuts connections, and knows which requests were on them.

It reads the `x-request-id` of requests as they pass. A cut loses what has not been delivered: the
client's side is reset or closed, and so is the server's.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

_RID = re.compile(rb"x-request-id: ([^\r\n]+)", re.IGNORECASE)
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close by a reset
CHUNK_BYTES = 65_536


class Cut(StrEnum):
    """How connections are cut."""

    RESET = "reset"  # both sides get a reset
    CLOSE = "close"  # both sides get an orderly end
    SERVER = "server's side"  # only the server notices; the client's side closes afterwards


@dataclass(eq=False)
class _Connection:
    """A client's connection. cut: where the requests on it go once it is cut."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    rid: str | None = None
    tail: bytes = b""
    cut: set[str] | None = None

    def note(self, data: bytes) -> None:
        """Find the request in what the client sends."""
        text = self.tail + data
        if found := _RID.findall(text):
            self.rid = found[-1].decode(errors="replace")
            if self.cut is not None:
                self.cut.add(self.rid)
        self.tail = text[-256:] if b"\r\n\r\n" not in data else b""

    def end_client(self, *, by_reset: bool = False) -> None:
        """Close the client's side. The client notices at once, and so sends nothing more here."""
        own = _socket_of(self.client)
        with suppress(OSError), own.dup() as unread:
            self.note(unread.recv(CHUNK_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        with suppress(OSError):
            if by_reset:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            own.shutdown(socket.SHUT_WR)
        self.client.transport.abort() if by_reset else self.client.close()


@dataclass(eq=False)
class CutProxy:
    """Forwards connections to `port` at 127.0.0.1. A context manager."""

    port: int
    listening_on: int = 0
    _connections: set[_Connection] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _flows: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> CutProxy:
        self._flows.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.listening_on = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self._flows.set()
        self.cut(Cut.CLOSE, lambda _: True)
        await asyncio.sleep(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listening_on}"

    def cut(self, how: Cut, chosen: Callable[[int], bool]) -> Set[str]:
        """Cut the connections whose place among those with a request is chosen.

        Returns their requests. One that its client has just sent may be added shortly afterwards.
        Connections that are still without a request stay: it would come without being seen.
        """
        rids: set[str] = set()
        used = [(found.rid, found) for found in self._connections if found.rid is not None]
        for place, (rid, victim) in enumerate(sorted(used, key=lambda pair: pair[0])):
            if not chosen(place):
                continue
            victim.cut = rids
            rids.add(rid)
            if how is Cut.RESET:
                _socket_of(victim.server).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                victim.server.transport.abort()
            else:
                victim.server.close()
            if how is not Cut.SERVER:  # there `_serve` closes it when the server's side has ended
                victim.end_client(by_reset=how is Cut.RESET)
        return rids

    async def stall(self, seconds: float) -> None:
        """Forward nothing for some time; nothing is lost."""
        self._flows.clear()
        await asyncio.sleep(seconds)
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream, to_server = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, to_server)
        self._connections.add(connection)
        try:
            await asyncio.gather(
                self._pump(reader, to_server, connection.note, to_server.close),
                self._pump(upstream, writer, lambda _: None, connection.end_client),
            )
        finally:
            self._connections.discard(connection)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        note: Callable[[bytes], None],
        end: Callable[[], None],
    ) -> None:
        """Forward one direction until its end."""
        with suppress(OSError, RuntimeError):
            while data := await reader.read(CHUNK_BYTES):
                note(data)
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        end()


def _socket_of(writer: asyncio.StreamWriter) -> socket.socket:
    found: socket.socket = writer.get_extra_info("socket")
    return found
