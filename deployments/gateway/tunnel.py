"""The gateway's end of the connections that carry answers: a listener, and one channel per request.

Each gateway listens on a Unix socket that only this user can open, and on TCP at the machine's
address once a replica on another machine needs it. A connection starts with the secret of a waiting
request. Small pieces merge on the socket: while the client is busy with one, the next ones gather
and are read together. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

from remora.deployments.gateway.frames import (
    SECRET_BYTES,
    BrokenFrame,
    Frame,
    FrameReader,
    Kind,
)
from remora.deployments.gateway.relayed_request import Address

HELLO_TIMEOUT_S = 10.0
READ_BYTES = 64 * 1024
# Time for bytes in transit once the replica's call has failed.
GRACE_S = 1.0
# The same once it has returned: all bytes come then, but a busy gateway reads them late.
IN_TRANSIT_S = 20.0
# Connections that wait to be accepted. Further ones fail at once.
BACKLOG = 4096


class CutOff(Exception):
    """An answer was cut off; if its replica failed, the cause is the error."""


class AnswerChannel:
    """The connection for one request's answer. Must be closed."""

    def __init__(self, tunnel: Tunnel, secret: bytes) -> None:
        self.secret = secret
        self.replica: str | None = None  # that took the request
        self._tunnel = tunnel
        self._connected = asyncio.Event()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._frames = FrameReader()
        self._has_begun = False
        self._failure: BaseException | None = None
        self._timers: list[asyncio.TimerHandle] = []

    async def taken(self) -> None:
        """Wait until a replica has taken the request. Raises CutOff if none can any more."""
        await self._connected.wait()
        if self._reader is None:
            raise CutOff from self._failure

    async def read(self) -> list[Frame]:
        """Return all frames that have arrived, at least one. Raises CutOff."""
        while True:
            await self.taken()
            reader = self._reader
            assert reader is not None
            try:
                data = await reader.read(READ_BYTES)
                frames = self._frames.feed(data)
            except (OSError, BrokenFrame) as error:
                raise CutOff from error
            if frames:
                self._has_begun = True
                return frames
            if not data:
                self._on_end(reader)

    def attach(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replica: str
    ) -> bool:
        """Use a replica's connection; False if another replica has begun the answer."""
        if self._has_begun or self._failure is not None:
            return False
        if self._writer is not None:
            self._writer.close()
        self._reader, self._writer, self.replica = reader, writer, replica
        self._frames = FrameReader()
        self._connected.set()
        return True

    def fail(self, error: BaseException) -> None:
        """End the channel with an error; bytes in transit are still read."""
        self._failure = error
        self._connected.set()
        if self._writer is not None:
            # A live replica has closed it by now; a dead machine never does.
            self._after(GRACE_S, self._writer.close)

    def expect_the_end(self, *, is_whole: bool) -> None:
        """End the channel if the answer does not arrive: its call has ended.

        is_whole:  the call has returned, so the replica has sent all of the answer
        """
        self._after(IN_TRANSIT_S if is_whole else GRACE_S, self._give_up)

    def _after(self, seconds: float, action: Callable[[], object]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, action))

    def _give_up(self) -> None:
        self._failure = self._failure or CutOff()
        self._connected.set()

    def close(self) -> None:
        """Close the connection; to the replica this is a client that disconnects."""
        self._tunnel.forget(self.secret)
        for timer in self._timers:
            timer.cancel()
        if self._writer is not None:
            self._writer.transport.abort()

    def _on_end(self, reader: asyncio.StreamReader) -> None:
        """Raise CutOff, unless Serve may still send the call to another replica."""
        if self._has_begun or self._failure is not None:
            raise CutOff from self._failure
        if self._reader is reader:
            self._reader = None
            self._connected.clear()


class Tunnel:
    """The listener that the replicas of all models connect to.

    host:  address of this machine within the cluster
    """

    def __init__(self, *, node_id: str, host: str) -> None:
        self._node_id = node_id
        self._host = host
        self._folder = tempfile.TemporaryDirectory(prefix="remora-", ignore_cleanup_errors=True)
        self._path = str(Path(self._folder.name) / "answers")
        self._port: int | None = None
        self._channels: dict[bytes, AnswerChannel] = {}
        self._servers: list[asyncio.Server] = []
        self._opening = asyncio.Lock()

    @property
    def address(self) -> Address:
        """Where the gateway listens now."""
        tcp = None if self._port is None else (self._host, self._port)
        return Address(node_id=self._node_id, path=self._path, tcp=tcp)

    async def open(self) -> None:
        """Listen for replicas on this machine."""
        server = await asyncio.start_unix_server(self._on_connect, self._path, backlog=BACKLOG)
        self._servers.append(server)

    async def open_tcp(self) -> None:
        """Listen on TCP too, for replicas on other machines."""
        async with self._opening:
            if self._port is None:
                server = await asyncio.start_server(
                    self._on_connect, self._host, 0, backlog=BACKLOG
                )
                self._port = server.sockets[0].getsockname()[1]
                self._servers.append(server)

    def close(self) -> None:
        """Stop listening, and close all connections."""
        for channel in list(self._channels.values()):
            channel.close()
        for server in self._servers:
            server.close()
        self._folder.cleanup()

    def open_channel(self) -> AnswerChannel:
        """Return a channel for a new request."""
        channel = AnswerChannel(self, secrets.token_bytes(SECRET_BYTES))
        self._channels[channel.secret] = channel
        return channel

    def forget(self, secret: bytes) -> None:
        """Stop accepting the answer to a request."""
        self._channels.pop(secret, None)

    async def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await _read_hello(reader)
        except (TimeoutError, OSError, EOFError, BrokenFrame):
            writer.transport.abort()
            return
        # A dictionary look-up by the secret leaks no timing about similar secrets.
        channel = self._channels.get(hello[:SECRET_BYTES])
        replica = hello[SECRET_BYTES:].decode("utf-8", "replace")
        if channel is None or not channel.attach(reader, writer, replica):
            writer.transport.abort()


async def _read_hello(reader: asyncio.StreamReader) -> bytes:
    """Read the first frame and nothing after it."""
    header = await reader.readexactly(5)
    length = int.from_bytes(header[1:], "big")
    if header[0] != Kind.HELLO or not SECRET_BYTES <= length <= 1024:
        raise BrokenFrame("the first frame is not HELLO")
    return await reader.readexactly(length)
