"""One client's connection: what it has received of its answer. Sends each ASGI message once.

Usually the replica's head and body pass through. A stream that waited for a replica has its head
already; an error that arrives instead of a stream is then sent as the stream's last event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import orjson
from starlette.types import Send

from remora.configs.errors import InvalidRequest
from remora.deployments.gateway.wait_queue import Phase
from remora.deployments.http.core.wire_formats import EVENT_STREAM, Dialect

_EARLY_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_ERROR_STATUS = 400


class ClientSide:
    """One client's connection.

    streams:  whether the client requested a stream of events
    stall_s:  time limit of one write

    `num_events`, `num_bytes` and `checksum` (CRC-32) count what was sent of the answer itself,
    without comments; `can_fail_late` = an error can only be sent as an event.
    """

    def __init__(self, send: Send, dialect: Dialect, *, streams: bool, stall_s: float) -> None:
        self.num_events = 0
        self.num_bytes = 0
        self.checksum = 0
        self._send = send
        self._dialect = dialect
        self._streams = streams
        self._stall_s = stall_s
        self._has_head = False
        self.can_fail_late = False
        self._error: bytearray | None = None  # a body to be sent as an event
        self._tail = b""  # the last bytes sent

    @property
    def has_answer(self) -> bool:
        """Whether a part of the answer has been sent, so that another try must continue it."""
        return self._has_head and (self.num_bytes > 0 or not self.can_fail_late)

    @property
    def _end_of_event(self) -> bytes:
        return b"\n\n" if self._dialect.media_type == EVENT_STREAM else b"\n"

    @property
    def _is_between_events(self) -> bool:
        return not self._tail or self._tail.endswith(self._end_of_event)

    async def report_phase(self, phase: Phase) -> None:
        """Send a comment to a stream that waits for a replica; other requests get nothing."""
        if not self._streams or not self._is_between_events:
            return
        if not self._has_head:
            headers = {"content-type": self._dialect.media_type, **_EARLY_HEADERS}
            self.can_fail_late = True
            await self._start(200, [(k.encode(), v.encode()) for k, v in headers.items()])
        await self._send_body(b": waiting for a replica (%s)\n\n" % phase.value.encode())

    async def pass_head(self, head: bytes) -> None:
        """Send a replica's status and headers."""
        fields: dict[str, Any] = orjson.loads(head)
        status = fields["status"]
        if self._has_head:
            self._error = bytearray() if status >= _ERROR_STATUS else None
            return
        raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in fields["headers"]]
        media_type = dict(raw).get(b"content-type", b"").decode("latin-1")
        self.can_fail_late = media_type.startswith(self._dialect.media_type) and status == 200
        await self._start(status, raw)

    async def pass_body(self, parts: Sequence[bytes]) -> None:
        """Send pieces of a body in one message."""
        if self._error is not None:
            self._error += b"".join(parts)
            return
        for part in parts:
            if part != self._dialect.keep_alive:
                # A part may hold several events; its data has no bare line ends.
                self.num_events += part.count(self._end_of_event)
                self.num_bytes += len(part)
                self.checksum = crc32(part, self.checksum)
        await self._send_body(parts[0] if len(parts) == 1 else b"".join(parts))

    async def end(self) -> None:
        """End the answer."""
        if self._error is not None:
            await self._send_body(self._event_of(bytes(self._error)) + self._dialect.last)
        await self._send_body(b"", is_last=True)

    async def fail(self, error: BaseException) -> None:
        """End a stream with an error event."""
        event = self._dialect.error_frame(error, self.num_events)
        # An event that was cut off ends here, so that the error event can be parsed.
        begin = b"" if self._is_between_events else self._end_of_event
        await self._send_body(begin + event + self._dialect.last)
        await self._send_body(b"", is_last=True)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_head = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_body(self, body: bytes, *, is_last: bool = False) -> None:
        """Send a piece. Raises TimeoutError after `stall_s`."""
        self._tail = (self._tail + body[-2:])[-2:]
        async with asyncio.timeout(self._stall_s):
            await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    def _event_of(self, body: bytes) -> bytes:
        value = orjson.loads(body)
        if self._dialect.late_error is None:
            return self._dialect.frame(value)
        inner = value["error"]
        error = InvalidRequest(inner["message"], inner["param"], inner["code"])
        return self._dialect.error_frame(error, self.num_events)
