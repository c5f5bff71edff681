"""Carrying requests to the replicas of one model, and their answers back.

One handle call per try: it lasts as long as the answer, so that Serve's counting, queueing,
cancelling and draining see the request for what it is. The answer's bytes come through the tunnel.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from remora.configs.errors import RequestCrashed, Unavailable
from remora.deployments.gateway.call import BrokenOff, Call, NoWayBack, Unreachable
from remora.deployments.gateway.client_side import ClientSide
from remora.deployments.gateway.crashes import Crashes
from remora.deployments.gateway.failures import DIED, cause_of, is_death, is_refusal, told
from remora.deployments.gateway.frames import Frame, Kind
from remora.deployments.gateway.tunnel import CutOff, Line, Tunnel
from remora.deployments.gateway.wait_queue import WaitingRoom
from remora.deployments.http.generation.resumption import Begun
from remora.deployments.routing.key import RouteKey
from remora.deployments.scoped_task import scoped_task

# Until Serve has found out what became of a replica that has hung up.
VERDICT_TIMEOUT_S = 10.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0

log = logging.getLogger(__name__)


class RelayMethod(Protocol):
    """The method `relay` of a model's replicas, by way of Serve's router."""

    def remote(self, call: Call, *, route: RouteKey) -> Any:
        """Start a call; what it returns can be awaited and cancelled."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A request as a gateway has read it.

    scope:        the plain part of its ASGI scope
    fingerprint:  by which it is known again
    """

    request_id: str
    scope: Mapping[str, Any]
    body: bytes
    key: RouteKey
    fingerprint: bytes


class Ledger(Protocol):
    """Counts what has befallen the requests for one model."""

    def crashed(self) -> None:
        """Count a replica that died over a request."""
        ...

    def resumed(self) -> None:
        """Count a stream that another replica continued."""
        ...


class _Progress:
    """What must be known of an answer for another replica to continue it."""

    def __init__(self) -> None:
        self._created = int(time.time())
        self._tokens: list[bytes] = []

    def note(self, tokens: bytes) -> None:
        """Take in what the next piece was made of."""
        self._tokens.append(tokens)

    def is_enough_for(self, client: ClientSide) -> bool:
        """Return whether another replica can go on from where the client is."""
        return bool(self._tokens) and client.can_fail_late

    def begun(self, client: ClientSide) -> Begun:
        """Return the answer as far as the client has it."""
        return Begun(
            created=self._created,
            tokens=tuple(self._tokens),
            num_bytes=client.num_bytes,
            checksum=client.checksum,
        )


class _Failed(Exception):
    """A try that came to nothing. Its cause is what Serve says."""


class Carrier:
    """The way to one model.

    resumes:  whether streams go on at another replica when theirs has died
    """

    def __init__(
        self,
        method: RelayMethod,
        tunnel: Tunnel,
        room: WaitingRoom,
        crashes: Crashes,
        ledger: Ledger,
        *,
        resumes: bool = False,
    ) -> None:
        self.room = room
        self._method = method
        self._tunnel = tunnel
        self._crashes = crashes
        self._ledger = ledger
        self._resumes = resumes

    async def carry(self, request: Incoming, client: ClientSide) -> None:
        """Answer a request. Raises what the client is to be told."""
        key, pause_s = request.key, _FIRST_PAUSE_S
        progress = _Progress() if self._resumes else None
        deadline = time.monotonic() + self.room.max_wait_s
        while True:
            if self._crashes.is_barred(request.fingerprint):
                raise RequestCrashed(self._crashes.verdict(request.fingerprint))
            line = self._tunnel.line()
            try:
                await self._try(request, key, line, client, progress)
                return
            except _Failed as failed:
                error = failed.__cause__ or failed
            finally:
                line.close()
            if isinstance(cause_of(error), Unreachable):
                await self._tunnel.open_to_others()
                continue
            if is_death(error):
                self._crashes.note(request.fingerprint)
                self._ledger.crashed()
                log.warning("a replica (%s) died over request %s", line.replica, request.request_id)
            elif is_refusal(error):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            is_late = is_refusal(error) and time.monotonic() > deadline
            if is_late or not (is_death(error) or is_refusal(error)):
                raise told(error) from error
            if client.has_answer:
                if progress is None or not progress.is_enough_for(client):
                    raise told(error) from error
                if is_death(error):
                    self._ledger.resumed()
            cause = cause_of(error)
            tried = cause.replica if isinstance(cause, NoWayBack) else line.replica
            if tried is not None:
                key = replace(key, avoid=key.avoid | {tried})

    async def _try(
        self,
        request: Incoming,
        key: RouteKey,
        line: Line,
        client: ClientSide,
        progress: _Progress | None,
    ) -> None:
        """Give the request to a replica and pass its answer on. Raises _Failed."""
        call = Call(
            scope=request.scope,
            body=request.body,
            address=self._tunnel.address,
            secret=line.secret,
            begun=None if progress is None else progress.begun(client),
        )
        response = self._method.remote(call, route=key)
        async with scoped_task(response) as verdict, scoped_task(line.taken()) as taken:
            verdict.add_done_callback(lambda done: _on_verdict(line, done))
            try:
                await self.room.wait_for(taken, client.tell)
                await _pass_on(line, client, progress)
                self._crashes.forgive(request.fingerprint)
                # An answer that has come to its end is followed by the end of its call.
                await asyncio.wait({verdict}, timeout=VERDICT_TIMEOUT_S)
            except CutOff:
                await asyncio.wait({verdict}, timeout=VERDICT_TIMEOUT_S)
                if not verdict.done() or verdict.cancelled():
                    raise _Failed from Unavailable(DIED)
                raise _Failed from verdict.exception() or BrokenOff()
            finally:
                if not verdict.done():
                    response.cancel()


def _on_verdict(line: Line, verdict: asyncio.Future[None]) -> None:
    """Let the reader of a line know how its call has ended."""
    error = None if verdict.cancelled() else verdict.exception()
    if error is not None:
        line.fail(error)
    else:
        line.expect_the_end()


async def _pass_on(line: Line, client: ClientSide, progress: _Progress | None) -> None:
    """Pass an answer on, piece by piece, until its end. Raises CutOff."""
    while True:
        frames = await line.read()
        parts: list[bytes] = []
        for frame in frames:
            if frame.kind is Kind.HEAD:
                await client.pass_head(frame.payload)
            elif frame.kind is Kind.BODY:
                parts.append(frame.payload)
            elif frame.kind is Kind.TOKENS and progress is not None:
                progress.note(frame.payload)
        if parts:
            await client.pass_body(parts)
        if _is_end(frames):
            await client.end()
            return


def _is_end(frames: list[Frame]) -> bool:
    return frames[-1].kind is Kind.END
