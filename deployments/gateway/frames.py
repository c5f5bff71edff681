"""The framing of an answer between a replica and a gateway. Does not know sockets or HTTP.

A frame is one byte of kind, four bytes of length (big-endian), and that many bytes. In order:

    HELLO   secret of the request, then the replica's id
    HEAD    JSON: status and headers
    BODY    bytes of the body, to be sent to the client unchanged
    TOKENS  before the BODY frames made of them: JSON of ids (see `generation/resumption.py`)
    END     the answer is complete

An answer without END was cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

SECRET_BYTES = 32
# A longer body is split, so that neither side buffers much of it.
MAX_BODY_BYTES = 64 * 1024
_HEADER_BYTES = 5
_MAX_BYTES = 2**24


class Kind(IntEnum):
    """The content of a frame."""

    HELLO = 1
    HEAD = 2
    BODY = 3
    TOKENS = 4
    END = 5


_KINDS = {int(kind): kind for kind in Kind}


class BrokenFrame(Exception):
    """The bytes are not frames."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame."""

    kind: Kind
    payload: bytes = b""

    def __bytes__(self) -> bytes:
        return bytes((self.kind,)) + len(self.payload).to_bytes(4, "big") + self.payload


def body_frames(body: bytes) -> bytes:
    """Return a body as BODY frames."""
    if len(body) <= MAX_BODY_BYTES:
        return bytes(Frame(Kind.BODY, body))
    parts = (body[at : at + MAX_BODY_BYTES] for at in range(0, len(body), MAX_BODY_BYTES))
    return b"".join(bytes(Frame(Kind.BODY, part)) for part in parts)


class FrameReader:
    """Parses frames from a stream of bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes. Raises BrokenFrame."""
        self._rest += data
        frames, at = [], 0
        while len(self._rest) - at >= _HEADER_BYTES:
            start = at + _HEADER_BYTES
            end = start + int.from_bytes(self._rest[at + 1 : start], "big")
            kind = _KINDS.get(self._rest[at])
            if kind is None or end - start > _MAX_BYTES:
                raise BrokenFrame(f"invalid frame: kind {self._rest[at]}, {end - start} bytes")
            if end > len(self._rest):
                break
            frames.append(Frame(kind, bytes(self._rest[start:end])))
            at = end
        del self._rest[:at]
        return frames
