"""The bytes of an answer on its way from a replica to a gateway. Knows no socket and no HTTP.

A frame is one byte of kind, four bytes of length (big-endian), and that many bytes. In order:

    HELLO   secret of the call, then the replica's id
    HEAD    JSON: status and headers
    BODY    bytes of the body, as they are to reach the client; TOKENS stand between them, each
            before the bytes that it became: JSON of ids (see `generation/resumption.py`)
    END     the answer is whole

An answer without its END was cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

SECRET_BYTES = 32
# A longer body goes in several frames, so that neither side holds much of it.
MAX_BODY_BYTES = 64 * 1024
_HEADER_BYTES = 5
_MAX_BYTES = 2**24


class Kind(IntEnum):
    """What a frame holds."""

    HELLO = 1
    HEAD = 2
    BODY = 3
    TOKENS = 4
    END = 5


_KINDS = {int(kind): kind for kind in Kind}


class BrokenFrame(Exception):
    """These bytes are no frames."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame."""

    kind: Kind
    payload: bytes = b""

    def __bytes__(self) -> bytes:
        return bytes((self.kind,)) + len(self.payload).to_bytes(4, "big") + self.payload


def body_frames(body: bytes) -> bytes:
    """Return the BODY frames of so many bytes, one after the other."""
    if len(body) <= MAX_BODY_BYTES:
        return bytes(Frame(Kind.BODY, body))
    parts = (body[at : at + MAX_BODY_BYTES] for at in range(0, len(body), MAX_BODY_BYTES))
    return b"".join(bytes(Frame(Kind.BODY, part)) for part in parts)


class FrameReader:
    """Cuts a stream of bytes into frames, however it arrives."""

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
                raise BrokenFrame(f"a frame of kind {self._rest[at]} with {end - start} bytes")
            if end > len(self._rest):
                break
            frames.append(Frame(kind, bytes(self._rest[start:end])))
            at = end
        del self._rest[:at]
        return frames
