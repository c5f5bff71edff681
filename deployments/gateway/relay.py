"""The replica's end: its HTTP application answers a relayed request; the bytes go to the gateway.

It is the same application, with the same checks, that clients reach without a gateway. A gateway
that closes the connection is a client that disconnects.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from zlib import crc32

import orjson
from starlette.types import ASGIApp, Message, Scope

from remora.configs.errors import EngineError, Unavailable
from remora.deployments.gateway.frames import Frame, Kind, body_frames
from remora.deployments.gateway.merge import WholeAnswer, no_answer
from remora.deployments.gateway.relayed_request import (
    Address,
    CannotContinue,
    GatewayUnreachable,
    RelayedRequest,
    TcpNeeded,
)
from remora.deployments.http.core.wire_formats import KEEP_ALIVES
from remora.deployments.http.generation.request_context import RESUMABLE
from remora.deployments.http.generation.resumption import Begun, ResumableAnswer

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
# There is no disconnect for a whole answer; a gateway waits a little longer than this.
WHOLE_TIMEOUT_S = 20.0
_DIFFERS = "The replica that worked on this request has died; no other can continue its answer."


def _own_ids() -> tuple[str, str]:
    import ray
    from ray import serve

    replica = serve.get_replica_context().replica_id.unique_id
    return ray.get_runtime_context().get_node_id(), replica


class Relay:
    """Answers requests that gateways relay.

    make_app:      called once, for the first request
    check_health:  raises EngineError when the engine has failed
    num_failures:  returns how often it has, also if it was repaired
    own_ids:       returns Ray's id of the machine, and Serve's id of the replica
    """

    def __init__(
        self,
        make_app: Callable[[], ASGIApp],
        check_health: Callable[[], None],
        *,
        num_failures: Callable[[], int] = lambda: 0,
        own_ids: Callable[[], tuple[str, str]] = _own_ids,
    ) -> None:
        self._app = functools.cache(make_app)
        self._check_health = check_health
        self._num_failures = num_failures
        self._own_ids = own_ids

    async def answer(self, relayed: RelayedRequest) -> None:
        """Answer a request; returns once the whole answer is sent.

        Raises TcpNeeded; GatewayUnreachable; Unavailable when the engine had failed before;
        EngineError when it fails while it answers: no END is sent then, so another replica may
        take over.
        """
        node_id, replica = self._own_ids()
        reader, writer = await _connect(relayed.address, node_id, replica)
        try:
            await _say_hello(writer, relayed.secret, replica)
            try:
                self._check_health()
            except EngineError as error:
                raise Unavailable("The engine has stopped and is being replaced.") from error
            before = self._num_failures()

            def check() -> None:
                self._check_health()
                if self._num_failures() != before:
                    raise EngineError("The engine has failed during this answer.")

            answer = _AnswerStream(relayed, reader, writer, check)
            scope = _full(relayed.scope)
            if relayed.begun is not None:
                scope["state"][RESUMABLE] = ResumableAnswer(relayed.begun, answer.note)
            await self._app()(scope, answer.receive, answer.send)
            await answer.end()
            writer.close()
            await writer.wait_closed()
        except OSError:
            pass  # the gateway disconnected, and the application has cancelled the request
        finally:
            writer.transport.abort()  # no effect if it is closed

    async def whole(self, scope: Mapping[str, Any], body: bytes) -> WholeAnswer:
        """Return the answer to a small request as a value; 503 when it takes too long."""
        start: Message = {}
        parts: list[bytes] = []
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not unread:
                await asyncio.get_running_loop().create_future()  # the caller does not disconnect
            return unread.pop()

        async def send(message: Message) -> None:
            start.update(message if message["type"] == "http.response.start" else {})
            parts.append(message.get("body", b""))

        _, replica = self._own_ids()
        try:
            async with asyncio.timeout(WHOLE_TIMEOUT_S):
                await self._app()(_full(scope), receive, send)
        except TimeoutError:
            return no_answer(replica)
        headers = tuple(_texts(start["headers"]))
        return WholeAnswer(replica, start["status"], headers, b"".join(parts))


async def _connect(
    address: Address, node_id: str, replica: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if address.node_id == node_id:
                return await asyncio.open_unix_connection(address.path)
            if address.tcp is None:
                raise TcpNeeded("The gateway is on another machine.")
            return await asyncio.open_connection(*address.tcp)
    except OSError as error:  # includes TimeoutError
        log.warning("relay: cannot connect to the gateway: %r", error)
        raise GatewayUnreachable(replica) from None


async def _say_hello(writer: asyncio.StreamWriter, secret: bytes, replica: str) -> None:
    try:
        writer.write(bytes(Frame(Kind.HELLO, secret + replica.encode())))
        # A Unix socket whose listener has a full queue is not connected, and shows it here.
        await writer.drain()
    except OSError as error:
        log.warning("relay: the gateway takes no connection: %r", error)
        raise GatewayUnreachable(replica) from None


class _AnswerStream:
    """One run of the application: the ASGI side of a connection."""

    def __init__(
        self,
        relayed: RelayedRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        check_health: Callable[[], None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._check_health = check_health
        self._failure: Exception | None = None
        self._is_whole = False
        self._body: bytes | None = relayed.body
        self._sent = None if relayed.begun is None else _SentPrefix(relayed.begun)

    async def receive(self) -> Message:
        """Return the body, then wait for the gateway to disconnect."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._reader.read(1)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send a part of the answer, unless the engine has failed.

        Raises ConnectionResetError if the gateway has left.
        """
        if self._writer.is_closing():
            raise ConnectionResetError("The gateway has closed the connection.")
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
        """Send the tokens of the next piece."""
        self._writer.write(bytes(Frame(Kind.TOKENS, tokens)))

    def _write_body(self, body: bytes) -> None:
        if self._sent is not None and body not in KEEP_ALIVES:
            body = self._sent.skip(body)
        if body:
            self._writer.write(body_frames(body))

    async def end(self) -> None:
        """Mark the answer complete, if it is: the application gives up on a stalled reader."""
        if self._failure is not None:  # the application handled it as an error of its own
            raise self._failure
        if self._sent is not None:
            self._sent.check_complete()
        if self._is_whole and not self._writer.is_closing():
            self._writer.write(bytes(Frame(Kind.END)))
            await self._writer.drain()


class _SentPrefix:
    """The part of an answer that the client has, to be skipped when it is written again."""

    def __init__(self, begun: Begun) -> None:
        self._num_bytes = begun.num_bytes
        self._wanted = begun.checksum
        self._found = 0

    def skip(self, body: bytes) -> bytes:
        """Return the new part of a piece. Raises CannotContinue if the old part differs."""
        if not self._num_bytes:
            return body
        old, new = body[: self._num_bytes], body[self._num_bytes :]
        self._num_bytes -= len(old)
        self._found = crc32(old, self._found)
        if not self._num_bytes and self._found != self._wanted:
            raise CannotContinue(_DIFFERS)
        return new

    def check_complete(self) -> None:
        """Raise CannotContinue if the answer is shorter than what the client has."""
        if self._num_bytes:
            raise CannotContinue(_DIFFERS)


def _full(scope: Mapping[str, Any]) -> Scope:
    """Return a complete ASGI scope."""
    return {**scope, "asgi": {"version": "3.0"}, "state": {}}


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
