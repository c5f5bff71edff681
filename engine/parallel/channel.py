"""Sockets between rank 0 and the others: steps go out, and nothing but bad news comes back.

Rank 0 listens on a Unix socket (one node) or on one TCP address, and takes in whoever brings the
secret. A step is not acknowledged: the ranks' exchange of tensors keeps them together. The end of
a process closes its sockets, so that each side hears of the other's end at once, also while
neither sends. Knows no models and no Ray.
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
    ComeIn,
    Failed,
    Message,
    decode,
    encode_failed,
)

BACKLOG = 512
POLL_S = 0.1
HELLO_TIMEOUT_S = 1.0  # for all of it: others wait meanwhile
SECRET_BYTES = 32
_HELLO = struct.Struct(f"<8sI{SECRET_BYTES}s")
_MAGIC = b"remora/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where rank 0 listens, and what opens.

    path:        of a Unix socket; "" = TCP
    host, port:  of TCP
    """

    secret: bytes
    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def key(self) -> str:
        """What only those who know the secret can tell, and that does not tell the secret."""
        return hmac.new(self.secret, b"group", "sha256").hexdigest()

    @property
    def family(self) -> socket.AddressFamily:
        """Of its sockets."""
        if self.path:
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


class Listener:
    """Rank 0 before the others have come. Close it when they have: no file, no port is left."""

    def __init__(self, host: str | None = None) -> None:
        """Listen at `host`; None = for processes of this node and user only."""
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

        Raises EngineError when time runs out or the listener is closed meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[int, socket.socket] = {}
        while len(found) < num_ranks - 1:
            if self._is_closed or time.monotonic() > deadline:
                _close_all(found)
                missing = ", ".join(str(r) for r in range(1, num_ranks) if r not in found)
                why = "start-up was given up" if self._is_closed else f"within {timeout_s:g} s"
                raise EngineError(f"Not every rank has come ({why}); missing: {missing}.")
            try:
                self._take(found, num_ranks)
            except TimeoutError:  # nobody yet
                continue
            except OSError:  # closed, which is seen above, or out of descriptors for now
                time.sleep(POLL_S)
        return found

    def close(self) -> None:
        """Listen no more; from any thread."""
        self._is_closed = True
        self._socket.close()
        if self._folder:
            with suppress(OSError):  # it was never bound, and may be too long for any file
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
        is_ours = magic == _MAGIC and hmac.compare_digest(secret, self.address.secret)
        if not is_ours or not 0 < rank < num_ranks or rank in found:
            connection.close()
            return
        connection.settimeout(None)
        _send_at_once(connection)
        found[rank] = connection


class Channel:
    """A follower's end."""

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
                f"Rank {rank} cannot reach rank 0 at {where}: {error}; the nodes of a replica must "
                "be able to reach each other on any port."
            ) from error
        return cls(connection)

    def come_in(self, timeout_s: float) -> ComeIn:
        """Wait until rank 0 lets all ranks in. Raises EngineError when it does not."""
        try:
            self._socket.settimeout(timeout_s)
            message = read_message(self._socket)
            self._socket.settimeout(None)
        except TimeoutError as error:
            raise EngineError(f"rank 0 has not let anybody in for {timeout_s:g} s") from error
        if not isinstance(message, ComeIn):
            raise EngineError("rank 0 has gone before all ranks had come")
        return message

    @property
    def is_lost(self) -> bool:
        """Whether rank 0 is gone, as far as is known without waiting."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def receive(self) -> Message | None:
        """Wait for what rank 0 says next; None: it is gone."""
        return read_message(self._socket)

    def fail(self, failed: Failed) -> None:
        """Tell rank 0 why this rank ends."""
        with suppress(OSError):
            self._socket.sendall(encode_failed(failed))

    def close(self) -> None:
        """Hang up. Whoever waits in `receive` returns."""
        hang_up(self._socket)


def read_message(connection: socket.socket) -> Message | None:
    """Read one frame; None when the other side is gone. Raises ValueError for nonsense."""
    with suppress(ConnectionError):
        head = read_exactly(connection, HEAD.size)
        if head is not None:
            length, kind = HEAD.unpack(head)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES}")
            payload = read_exactly(connection, length)
            if payload is not None:
                return decode(kind, payload)
    return None


def read_exactly(connection: socket.socket, count: int) -> memoryview | None:
    """Read `count` bytes; None when the other side hangs up before."""
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
    """Close a connection; threads that wait on it wake up."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _send_at_once(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _close_all(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
