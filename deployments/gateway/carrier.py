"""Sends requests to the replicas of one model, and their answers to the clients.

Each try is one handle call that lasts as long as the answer, so that Serve's counting, queueing,
cancelling and draining include it. The answer's bytes arrive through the tunnel.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from remora.configs.errors import RequestCrashed, Unavailable
from remora.deployments.gateway.client_side import ClientSide
from remora.deployments.gateway.crashes import CrashCounts
from remora.deployments.gateway.failures import DIED, cause_of, client_error, is_death, is_refusal
from remora.deployments.gateway.frames import Kind
from remora.deployments.gateway.metrics import ModelFailures
from remora.deployments.gateway.relayed_request import (
    AnswerTruncated,
    GatewayUnreachable,
    RelayedRequest,
    TcpNeeded,
)
from remora.deployments.gateway.tunnel import AnswerChannel, CutOff, Tunnel
from remora.deployments.gateway.wait_queue import WaitQueue
from remora.deployments.http.generation.resumption import Begun
from remora.deployments.routing.key import RouteKey
from remora.deployments.scoped_task import scoped_task

# Time for Serve to report why a replica closed its connection.
OUTCOME_TIMEOUT_S = 10.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A request that a gateway has read.

    scope:        the plain part of its ASGI scope
    fingerprint:  digest that is the same when the client repeats the request
    """

    request_id: str
    scope: Mapping[str, Any]
    body: bytes
    key: RouteKey
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class _Progress:
    """The state of an answer that another replica needs to continue it.

    tokens:  of each piece so far
    """

    created: int = field(default_factory=lambda: int(time.time()))
    tokens: list[bytes] = field(default_factory=list)

    def begun(self, client: ClientSide) -> Begun:
        """Return the part of the answer that the client has."""
        return Begun(
            created=self.created,
            tokens=tuple(self.tokens),
            num_bytes=client.num_bytes,
            checksum=client.checksum,
        )


class _Failed(Exception):
    """A try failed; the cause is Serve's error."""


class Carrier:
    """Answers requests for one model.

    method:   handle of the method `relay` of its replicas, called through Serve's router
    resumes:  whether another replica continues a stream when its replica has died
    """

    def __init__(
        self,
        method: Any,
        tunnel: Tunnel,
        wait_queue: WaitQueue,
        crashes: CrashCounts,
        failures: ModelFailures,
        *,
        resumes: bool = False,
    ) -> None:
        self.wait_queue = wait_queue
        self._method = method
        self._tunnel = tunnel
        self._crashes = crashes
        self._failures = failures
        self._resumes = resumes

    async def carry(self, request: Incoming, client: ClientSide) -> None:
        """Answer a request. Raises the error for the client."""
        key, pause_s = request.key, _FIRST_PAUSE_S
        progress = _Progress() if self._resumes else None
        deadline = time.monotonic() + self.wait_queue.max_wait_s
        while True:
            if self._crashes.is_barred(request.fingerprint):
                raise RequestCrashed(self._crashes.message(request.fingerprint))
            channel = self._tunnel.open_channel()
            try:
                await self._try(request, key, channel, client, progress)
                return
            except _Failed as failed:
                error = failed.__cause__ or failed
            finally:
                channel.close()
            if isinstance(cause_of(error), TcpNeeded):
                await self._tunnel.open_tcp()
                continue
            if is_death(error):
                self._crashes.note(request.fingerprint)
                self._failures.crashed()
                log.warning(
                    "gateway: replica %s died; request_id=%s", channel.replica, request.request_id
                )
            elif is_refusal(error):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            elif isinstance(cause_of(error), AnswerTruncated):
                log.warning(
                    "gateway: the answer of replica %s has no end; request_id=%s",
                    channel.replica,
                    request.request_id,
                )
            is_late = is_refusal(error) and time.monotonic() > deadline
            if is_late or not (is_death(error) or is_refusal(error)):
                raise client_error(error) from error
            if client.has_answer:
                can_continue = progress and progress.tokens and client.can_fail_late
                if not can_continue:
                    raise client_error(error) from error
                if is_death(error):
                    self._failures.resumed()
            cause = cause_of(error)
            tried = cause.replica if isinstance(cause, GatewayUnreachable) else channel.replica
            if tried is not None:
                key = replace(key, avoid=key.avoid | {tried})

    async def _try(
        self,
        request: Incoming,
        key: RouteKey,
        channel: AnswerChannel,
        client: ClientSide,
        progress: _Progress | None,
    ) -> None:
        """Send the request to a replica and its answer to the client. Raises _Failed."""
        call = RelayedRequest(
            scope=request.scope,
            body=request.body,
            address=self._tunnel.address,
            secret=channel.secret,
            begun=None if progress is None else progress.begun(client),
        )
        response = self._method.remote(call, route=key)
        async with scoped_task(response) as outcome, scoped_task(channel.taken()) as taken:
            outcome.add_done_callback(lambda done: _on_outcome(channel, done))
            try:
                await self.wait_queue.wait_for(taken, client.report_phase)
                await _pass_on(channel, client, progress)
                self._crashes.forgive(request.fingerprint)
                # The call ends soon after a complete answer.
                await asyncio.wait({outcome}, timeout=OUTCOME_TIMEOUT_S)
            except CutOff:
                await asyncio.wait({outcome}, timeout=OUTCOME_TIMEOUT_S)
                if not outcome.done() or outcome.cancelled():
                    raise _Failed from Unavailable(DIED)
                raise _Failed from outcome.exception() or AnswerTruncated()
            finally:
                if not outcome.done():
                    response.cancel()


def _on_outcome(channel: AnswerChannel, outcome: asyncio.Future[None]) -> None:
    """Record in a channel how its call ended."""
    if outcome.cancelled():
        channel.expect_the_end(is_whole=False)
    elif error := outcome.exception():
        channel.fail(error)
    else:
        channel.expect_the_end(is_whole=True)


async def _pass_on(channel: AnswerChannel, client: ClientSide, progress: _Progress | None) -> None:
    """Pass an answer on to the client until its end. Raises CutOff."""
    while True:
        frames = await channel.read()
        parts: list[bytes] = []
        for frame in frames:
            if frame.kind is Kind.HEAD:
                await client.pass_head(frame.payload)
            elif frame.kind is Kind.BODY:
                parts.append(frame.payload)
            elif frame.kind is Kind.TOKENS and progress is not None:
                progress.tokens.append(frame.payload)
        if parts:
            await client.pass_body(parts)
        if frames[-1].kind is Kind.END:
            await client.end()
            return
