"""Sockets between rank 0 and the others: rank 0 sends steps, the others report failures only.

Rank 0 listens on a Unix socket (one node) or a TCP address, and accepts connections that present
the secret. Steps are not acknowledged: the ranks' exchange of tensors synchronises them. When a
process ends, its sockets close, so each side notices the other's end at once. Knows no models and
no Ray.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from remora.configs.errors import EngineError
from remora.engine.parallel.wire import (
    HEAD,
    MAX_FRAME_BYTES,
    Failed,
    JoinGroup,
    Message,
    decode,
    encode_failed,
)

BACKLOG = 512
POLL_S = 0.1
HELLO_TIMEOUT_S = 1.0  # for the whole message: other ranks wait meanwhile
SECRET_BYTES = 32
_HELLO = struct.Struct(f"<8sI{SECRET_BYTES}s")
_MAGIC = b"remora/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where rank 0 listens, and the secret that it expects.

    path:        of a Unix socket; "" = TCP
    host, port:  of TCP
    """

    secret: bytes
    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def key(self) -> str:
        """A key derived from the secret, which does not reveal it."""
        return hmac.new(self.secret, b"group", "sha256").hexdigest()

    @property
    def family(self) -> socket.AddressFamily:
        """Address family of its sockets."""
        if self.path:
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


class Listener:
    """Rank 0's socket until the others have connected. `close` removes its file and port."""

    def __init__(self, host: str | None = None) -> None:
        """Listen at `host`; None = only for processes of this node and user."""
        secret = secrets.token_bytes(SECRET_BYTES)
        self._folder = "" if host else tempfile.mkdtemp(prefix="remora-")
        if host is None:
            self.address = Address(secret=secret, path=os.path.join(self._folder, "steps"))
        else:
            self.address = Address(secret=secret, host=host)
        self._is_closed = False
        self._socket = socket.socket(self.address.family, socket.SOCK_STREAM)
        try:
            self._socket.bind(self.address.path or (host, 0))
            self._socket.listen(BACKLOG)
        except OSError as error:
            self.close()
            where = self.address.path or host
            raise EngineError(f"Rank 0 cannot listen at {where}: {error}.") from error
        if host is not None:
            self.address = replace(self.address, port=self._socket.getsockname()[1])
        self._socket.settimeout(POLL_S)

    def accept(self, num_ranks: int, timeout_s: float) -> dict[int, socket.socket]:
        """Wait for ranks 1 to num_ranks - 1; return their connections by rank.

        Raises EngineError after `timeout_s`, or if the listener is closed meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[int, socket.socket] = {}
        while len(found) < num_ranks - 1:
            if self._is_closed or time.monotonic() > deadline:
                for connection in found.values():
                    connection.close()
                missing = ", ".join(str(r) for r in range(1, num_ranks) if r not in found)
                why = "start-up was cancelled" if self._is_closed else f"within {timeout_s:g} s"
                raise EngineError(f"Not every rank connected ({why}); missing: {missing}.")
            try:
                self._take(found, num_ranks)
            except TimeoutError:  # no connection yet
                continue
            except OSError:  # closed, as the loop notices, or out of descriptors for now
                time.sleep(POLL_S)
        return found

    def close(self) -> None:
        """Stop to listen. Thread-safe."""
        self._is_closed = True
        self._socket.close()
        if self._folder:
            with suppress(OSError):  # never bound; the path may be too long for a file
                os.unlink(self.address.path)
            with suppress(FileNotFoundError):
                os.rmdir(self._folder)

    def _take(self, found: dict[int, socket.socket], num_ranks: int) -> None:
        connection, _ = self._socket.accept()
        try:
            hello = _read_hello(connection)
        except OSError:
            hello = None
        magic, rank, secret = _HELLO.unpack(hello) if hello is not None else (b"", 0, b"")
        is_generated = magic == _MAGIC and hmac.compare_digest(secret, self.address.secret)
        if not is_generated or not 0 < rank < num_ranks or rank in found:
            connection.close()
            return
        connection.settimeout(None)
        _send_at_once(connection)
        found[rank] = connection


class Channel:
    """A follower's end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def connect(cls, address: Address, rank: int, timeout_s: float) -> Channel:
        """Connect as `rank`. Raises EngineError."""
        where: str | tuple[str, int] = address.path or (address.host, address.port)
        connection = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(where)
            connection.settimeout(None)
            _send_at_once(connection)
            connection.sendall(_HELLO.pack(_MAGIC, rank, address.secret))
        except OSError as error:
            connection.close()
            raise EngineError(
                f"Rank {rank} cannot reach rank 0 at {where}: {error}. The nodes of a replica must "
                "reach each other on any port."
            ) from error
        return cls(connection)

    def wait_to_join(self, timeout_s: float) -> JoinGroup:
        """Wait until rank 0 lets all ranks join the tensor group. Raises EngineError."""
        try:
            self._socket.settimeout(timeout_s)
            message = read_message(self._socket)
            self._socket.settimeout(None)
        except TimeoutError as error:
            raise EngineError(f"rank 0 sent no JoinGroup within {timeout_s:g} s") from error
        if not isinstance(message, JoinGroup):
            raise EngineError("rank 0 closed the connection before all ranks had connected")
        return message

    @property
    def is_lost(self) -> bool:
        """Whether rank 0 is known to be gone, without waiting."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def receive(self) -> Message | None:
        """Wait for rank 0's next message; None = it is gone."""
        return read_message(self._socket)

    def fail(self, failed: Failed) -> None:
        """Report to rank 0 why this rank ends."""
        with suppress(OSError):
            self._socket.sendall(encode_failed(failed))

    def close(self) -> None:
        """Close the connection; a thread that waits in `receive` returns."""
        hang_up(self._socket)


def read_message(connection: socket.socket) -> Message | None:
    """Read one frame; None when the other side is gone. Raises ValueError for invalid frames."""
    with suppress(ConnectionError):
        head = read_exactly(connection, HEAD.size)
        if head is not None:
            length, kind = HEAD.unpack(head)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            payload = read_exactly(connection, length)
            if payload is not None:
                return decode(kind, payload)
    return None


def read_exactly(connection: socket.socket, count: int) -> memoryview | None:
    """Read `count` bytes; None when the other side closes the connection before."""
    view = memoryview(bytearray(count))
    at = 0
    while at < count:
        got = connection.recv_into(view[at:])
        if got == 0:
            return None
        at += got
    return view


def _read_hello(connection: socket.socket) -> bytes | None:
    deadline = time.monotonic() + HELLO_TIMEOUT_S
    hello = b""
    while len(hello) < _HELLO.size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(_HELLO.size - len(hello))
        if not part or time.monotonic() > deadline:
            return None
        hello += part
    return hello


def hang_up(connection: socket.socket) -> None:
    """Close a connection and wake threads that wait on it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _send_at_once(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
