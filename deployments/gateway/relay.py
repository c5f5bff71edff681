"""The replica's end: its own HTTP application answers a call, and the bytes go to the gateway.

The application is the very one that clients reach where there is no gateway, with the same checks.
A gateway that hangs up is a client that has gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from zlib import crc32

import orjson
from starlette.types import ASGIApp, Message, Scope

from remora.configs.errors import EngineError, Unavailable
from remora.deployments.gateway.call import Address, Call, CannotContinue, NoWayBack, Unreachable
from remora.deployments.gateway.frames import Frame, Kind, body_frames
from remora.deployments.gateway.merge import Whole, no_answer
from remora.deployments.http.core.wire_formats import KEEP_ALIVES
from remora.deployments.http.generation.resumption import Begun, go_on_from

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
# Nobody says when whoever asked for a whole answer has left; a gateway waits a little longer.
WHOLE_TIMEOUT_S = 20.0
_DIFFERS = "The replica that worked on this request has died; no other can continue its answer."


def _whereabouts() -> tuple[str, str]:
    import ray
    from ray import serve

    replica = serve.get_replica_context().replica_id.unique_id
    return ray.get_runtime_context().get_node_id(), replica


class Relay:
    """Answers the calls of gateways.

    make_app:      called once, for the first call
    check_health:  raises EngineError when no answer of ours can be trusted any more
    whereabouts:   returns Ray's id of the machine, and Serve's of the replica
    """

    def __init__(
        self,
        make_app: Callable[[], ASGIApp],
        check_health: Callable[[], None],
        *,
        whereabouts: Callable[[], tuple[str, str]] = _whereabouts,
    ) -> None:
        self._make_app = make_app
        self._check_health = check_health
        self._whereabouts = whereabouts
        self._app: ASGIApp | None = None

    async def answer(self, call: Call) -> None:
        """Carry out a call; returns once all of the answer is on its way.

        Raises Unreachable; NoWayBack; Unavailable when the engine had failed before; EngineError
        when it has failed under way: then no END was sent, so another replica may take over.
        """
        node_id, replica = self._whereabouts()
        reader, writer = await _connect(call.address, node_id, replica)
        try:
            writer.write(bytes(Frame(Kind.HELLO, call.secret + replica.encode())))
            self._refuse_if_failed()
            if self._app is None:
                self._app = self._make_app()
            answer = _Answer(call, reader, writer, self._check_health)
            if call.begun is not None:
                go_on_from(call.begun, answer.note)
            await self._app(_full(call.scope), answer.receive, answer.send)
            await answer.end()
            writer.close()
            await writer.wait_closed()
        except OSError:
            pass  # the gateway has hung up; what was generating is closed by now
        finally:
            writer.transport.abort()  # does nothing to one that is closed

    def _refuse_if_failed(self) -> None:
        try:
            self._check_health()
        except EngineError as error:
            raise Unavailable("The engine has stopped and is being replaced.") from error

    async def whole(self, scope: Mapping[str, Any], body: bytes) -> Whole:
        """Return the answer to a small request as a value; 503 when it takes too long."""
        if self._app is None:
            self._app = self._make_app()
        start: Message = {}
        parts: list[bytes] = []

        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not unread:
                await asyncio.get_running_loop().create_future()  # whoever asks does not leave
            return unread.pop()

        async def send(message: Message) -> None:
            start.update(message if message["type"] == "http.response.start" else {})
            parts.append(message.get("body", b""))

        _, replica = self._whereabouts()
        try:
            async with asyncio.timeout(WHOLE_TIMEOUT_S):
                await self._app(_full(scope), receive, send)
        except TimeoutError:
            return no_answer(replica)
        headers = tuple(_texts(start["headers"]))
        return Whole(replica, start["status"], headers, b"".join(parts))


async def _connect(
    address: Address, node_id: str, replica: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if address.node_id == node_id:
                return await asyncio.open_unix_connection(address.path)
            if address.tcp is None:
                raise Unreachable("The gateway is on another machine.")
            return await asyncio.open_connection(*address.tcp)
    except OSError as error:  # of which TimeoutError is one
        log.warning("the gateway of a request cannot be reached: %r", error)
        raise NoWayBack(replica) from None


class _Answer:
    """One run of the application: the ASGI side of a connection."""

    def __init__(
        self,
        call: Call,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        check_health: Callable[[], None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._check_health = check_health
        self._failure: Exception | None = None
        self._is_whole = False
        self._body: bytes | None = call.body
        self._had = None if call.begun is None else _Had(call.begun)

    async def receive(self) -> Message:
        """Give the body, then wait for the gateway to hang up."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._reader.read(1)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Pass a part of the answer on, unless the engine that made it has failed."""
        try:
            self._check_health()
            await self._pass_on(message)
        except (EngineError, CannotContinue) as error:
            self._failure = error
            raise

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            head = {"status": message["status"], "headers": _texts(message.get("headers", ()))}
            self._writer.write(bytes(Frame(Kind.HEAD, orjson.dumps(head))))
        elif body := message.get("body", b""):
            self._write_body(body)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._is_whole = True
        await self._writer.drain()

    def note(self, tokens: bytes) -> None:
        """Tell the gateway what the next piece is made of."""
        self._writer.write(bytes(Frame(Kind.TOKENS, tokens)))

    def _write_body(self, body: bytes) -> None:
        if self._had is not None and body not in KEEP_ALIVES:
            body = self._had.leave_out(body)
        if body:
            self._writer.write(body_frames(body))

    async def end(self) -> None:
        """Say that the answer is whole, if it is: readers that stall are given up on."""
        if self._failure is not None:  # the application has taken it for its own error to report
            raise self._failure
        if self._had is not None:
            self._had.check_all_was_left_out()
        if self._is_whole:
            self._writer.write(bytes(Frame(Kind.END)))
            await self._writer.drain()


class _Had:
    """What a client has had of an answer, to be left out when it is written again."""

    def __init__(self, begun: Begun) -> None:
        self._num_bytes = begun.num_bytes
        self._wanted = begun.checksum
        self._found = 0

    def leave_out(self, body: bytes) -> bytes:
        """Return what is new in the next piece. Raises CannotContinue if that differs."""
        if not self._num_bytes:
            return body
        old, new = body[: self._num_bytes], body[self._num_bytes :]
        self._num_bytes -= len(old)
        self._found = crc32(old, self._found)
        if not self._num_bytes and self._found != self._wanted:
            raise CannotContinue(_DIFFERS)
        return new

    def check_all_was_left_out(self) -> None:
        """Raise CannotContinue if the answer ended before it was where the client is."""
        if self._num_bytes:
            raise CannotContinue(_DIFFERS)


def _full(scope: Mapping[str, Any]) -> Scope:
    """Return the scope that the client's request had at the gateway."""
    return {**scope, "asgi": {"version": "3.0"}, "state": {}}


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
