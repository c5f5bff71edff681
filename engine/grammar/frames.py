"""Messages between this process and the compiler's: a JSON head, and bytes after it."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

_LENGTHS = struct.Struct("<II")
MAX_HEAD_BYTES = 64 * 2**20


def frame(head: dict[str, Any], body: bytes = b"") -> bytes:
    """Return one message as bytes."""
    text = json.dumps(head).encode()
    return _LENGTHS.pack(len(text), len(body)) + text + body


def read_frame(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Read one message; None at the end of the stream. Raises EOFError within a message."""
    lengths = stream.read(_LENGTHS.size)
    if not lengths:
        return None
    head_size, body_size = _LENGTHS.unpack(_whole(lengths, _LENGTHS.size))
    if head_size > MAX_HEAD_BYTES:
        raise EOFError("a message that is none")
    head = json.loads(_whole(stream.read(head_size), head_size))
    return head, _whole(stream.read(body_size), body_size)


def frame_size(received: bytes | bytearray) -> int | None:
    """Return how long the message is that begins here, once that is known."""
    if len(received) < _LENGTHS.size:
        return None
    head_size, body_size = _LENGTHS.unpack_from(received)
    return _LENGTHS.size + int(head_size) + int(body_size)


def _whole(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise EOFError("the stream ended within a message")
    return data
