"""The gateway's end of the way that answers take: a socket, and who waits for what comes there.

One listener per gateway: a Unix socket that only this user may reach, and TCP on the machine's
address from the moment that a replica on another machine asks for it. Whoever connects has to show
the secret of a call that waits. Reading a socket is what merges small pieces: the first comes at
once, and while the client is busy with it the others gather. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

from remora.deployments.gateway.call import Address
from remora.deployments.gateway.frames import (
    SECRET_BYTES,
    BrokenFrame,
    Frame,
    FrameReader,
    Kind,
)

HELLO_TIMEOUT_S = 10.0
READ_BYTES = 64 * 1024
# Given to bytes that are under way when it is known that no more will follow.
GRACE_S = 1.0


class CutOff(Exception):
    """An answer ended before its end; or, with a cause, its replica failed."""


class Line:
    """One call's end of the tunnel. Must be closed."""

    def __init__(self, tunnel: Tunnel, secret: bytes) -> None:
        self.secret = secret
        self.replica: str | None = None  # who has taken the call
        self._tunnel = tunnel
        self._connected = asyncio.Event()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._frames = FrameReader()
        self._has_begun = False
        self._failure: BaseException | None = None
        self._timers: list[asyncio.TimerHandle] = []

    async def taken(self) -> None:
        """Wait until a replica has taken the call. Raises CutOff if that cannot be any more."""
        await self._connected.wait()
        if self._reader is None:
            raise CutOff from self._failure

    async def read(self) -> list[Frame]:
        """Return all that has gathered, at least one frame. Raises CutOff."""
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
        """Take a replica's connection; False if the call has its answer from another already."""
        if self._has_begun or self._failure is not None:
            return False
        if self._writer is not None:
            self._writer.close()
        self._reader, self._writer, self.replica = reader, writer, replica
        self._frames = FrameReader()
        self._connected.set()
        return True

    def fail(self, error: BaseException) -> None:
        """Let the reader know that no more will come than what has been written."""
        self._failure = error
        self._connected.set()
        if self._writer is not None:
            # Most have hung up by now; a machine that is gone does not.
            self._soon(self._writer.close)

    def expect_the_end(self) -> None:
        """Let the reader wait no longer for a replica: whoever had the call is done with it."""
        self._soon(self._give_up)

    def _soon(self, action: Callable[[], object]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(GRACE_S, action))

    def _give_up(self) -> None:
        self._failure = self._failure or CutOff()
        self._connected.set()

    def close(self) -> None:
        """Hang up; the replica takes that for its client having gone."""
        self._tunnel.forget(self.secret)
        for timer in self._timers:
            timer.cancel()
        if self._writer is not None:
            self._writer.transport.abort()

    def _on_end(self, reader: asyncio.StreamReader) -> None:
        """Raise CutOff, unless Serve may still give the call to another replica by itself."""
        if self._has_begun or self._failure is not None:
            raise CutOff from self._failure
        if self._reader is reader:
            self._reader = None
            self._connected.clear()


class Tunnel:
    """Where the replicas of all models connect to.

    host:  address of this machine that other machines of the cluster know
    """

    def __init__(self, *, node_id: str, host: str) -> None:
        self._node_id = node_id
        self._host = host
        self._folder = tempfile.TemporaryDirectory(prefix="remora-", ignore_cleanup_errors=True)
        self._path = str(Path(self._folder.name) / "answers")
        self._port: int | None = None
        self._lines: dict[bytes, Line] = {}
        self._servers: list[asyncio.Server] = []
        self._opening = asyncio.Lock()

    @property
    def address(self) -> Address:
        """Where it listens now."""
        tcp = None if self._port is None else (self._host, self._port)
        return Address(node_id=self._node_id, path=self._path, tcp=tcp)

    async def open(self) -> None:
        """Listen for replicas of this machine."""
        self._servers.append(await asyncio.start_unix_server(self._on_connect, self._path))

    async def open_to_others(self) -> None:
        """Listen for replicas of other machines, too."""
        async with self._opening:
            if self._port is None:
                server = await asyncio.start_server(self._on_connect, self._host, 0)
                self._port = server.sockets[0].getsockname()[1]
                self._servers.append(server)

    def close(self) -> None:
        """Stop listening, and hang up on everybody."""
        for line in list(self._lines.values()):
            line.close()
        for server in self._servers:
            server.close()
        self._folder.cleanup()

    def line(self) -> Line:
        """Return the end of a new call."""
        line = Line(self, secrets.token_bytes(SECRET_BYTES))
        self._lines[line.secret] = line
        return line

    def forget(self, secret: bytes) -> None:
        """Expect this call no more."""
        self._lines.pop(secret, None)

    async def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await _read_hello(reader)
        except (TimeoutError, OSError, EOFError, BrokenFrame):
            writer.transport.abort()
            return
        # The secret is the key of a dictionary: finding it tells nothing of those that are near.
        line = self._lines.get(hello[:SECRET_BYTES])
        replica = hello[SECRET_BYTES:].decode("utf-8", "replace")
        if line is None or not line.attach(reader, writer, replica):
            writer.transport.abort()


async def _read_hello(reader: asyncio.StreamReader) -> bytes:
    """Read the first frame and nothing after it."""
    header = await reader.readexactly(5)
    length = int.from_bytes(header[1:], "big")
    if header[0] != Kind.HELLO or not SECRET_BYTES <= length <= 1024:
        raise BrokenFrame("no greeting")
    return await reader.readexactly(length)
