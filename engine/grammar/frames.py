"""Messages to and from the compiler process: a JSON head followed by bytes.

A connection carries one message in each direction.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_LENGTHS = struct.Struct("<II")
_READ_BYTES = 2**20


def frame(head: dict[str, Any], body: bytes = b"") -> bytes:
    """Return one message as bytes."""
    text = json.dumps(head).encode()
    return _LENGTHS.pack(len(text), len(body)) + text + body


def receive(connection: socket.socket, timeout_s: float) -> tuple[dict[str, Any], bytes]:
    """Read the message of a connection within `timeout_s`.

    Raises TimeoutError, another OSError, or EOFError if the message is incomplete.
    """
    deadline = time.monotonic() + timeout_s
    received = bytearray()
    while len(received) < (size := _size(received)):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no message within {timeout_s:g} s")
        connection.settimeout(left)
        piece = connection.recv(_READ_BYTES)
        if not piece:
            raise EOFError("the connection ended within a message")
        received += piece
    if len(received) > size:
        raise EOFError("something else came after a message cut short")
    head_size, _ = _LENGTHS.unpack_from(received)
    head_end = _LENGTHS.size + head_size
    return json.loads(received[_LENGTHS.size : head_end]), bytes(received[head_end:])


def _size(received: bytearray) -> int:
    """Return the length of the message that starts here, or None if it is not known yet."""
    if len(received) < _LENGTHS.size:
        return _LENGTHS.size
    head_size, body_size = _LENGTHS.unpack_from(received)
    return _LENGTHS.size + int(head_size) + int(body_size)
