"""A request that ends at any moment leaves nothing behind in the gateway or the replica."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import ASGIApp

from remora.deployments.gateway.gateway import Gateway
from remora.deployments.gateway.relayed_request import RelayedRequest
from remora.deployments.gateway.tunnel import Tunnel
from remora.deployments.routing.key import RouteKey
from tests.deployments.connection import Connection
from tests.deployments.fakes import FakeEngine, FakeServer
from tests.deployments.gateway.fakes import NODE, Replica, Replicas, gateway, ready, until
from tests.moments import cancelled, end, nothing_left, steps

PATH, BODY = "/v1/completions", {"prompt": "x", "stream": True}


async def begin_to_hold(app: ASGIApp) -> None:
    """Let the gateway notice that there is no replica, so that it holds later requests at once."""
    first = Connection(app, PATH, BODY)
    await until(lambda: first.sent)
    first.task.cancel()
    await end(first.task)


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("ends", ["leave", "cancel", "leave and cancel", "cancel again"])
@pytest.mark.parametrize("is_ready", [True, False])
async def test_a_request_ends_at_any_moment(is_ready: bool, ends: str, takes: bool) -> None:
    replica = Replica("one", FakeServer(FakeEngine(gate=asyncio.Event())))
    replicas = ready(replica) if is_ready else Replicas([replica])
    async with gateway(replicas) as client:
        app: ASGIApp = client._transport.app  # type: ignore[attr-defined]
        if not is_ready:
            await begin_to_hold(app)
        async with nothing_left():
            for moment in range(36):
                connection = Connection(app, PATH, BODY, takes_bodies=takes)
                await steps(moment)
                if "leave" in ends:
                    connection.leave()
                if ends == "leave and cancel":
                    await steps(moment % 5)
                if "cancel" in ends:
                    connection.task.cancel()
                await end(connection.task, again=ends == "cancel again")
                await until(lambda: not replicas.open)
                assert not replica.server.client.running


class HangingReplica(Replica):
    """A replica that responds but whose call never ends."""

    async def answer(self, call: RelayedRequest, route: RouteKey) -> None:
        await super().answer(call, route)
        await asyncio.Event().wait()


async def test_a_client_that_leaves_after_the_end_of_its_answer_ends_the_call() -> None:
    replicas = ready(HangingReplica("one"))
    async with gateway(replicas) as client, nothing_left():
        connection = Connection(
            client._transport.app,  # type: ignore[attr-defined]
            PATH,
            BODY,
        )
        await until(lambda: connection.sent and not connection.sent[-1].get("more_body", True))
        await steps(5)
        assert replicas.open
        connection.leave()
        await end(connection.task)
        await until(lambda: not replicas.open)


@pytest.mark.parametrize("again", [False, True])
async def test_a_replicas_end_of_a_call_may_be_cancelled_at_any_moment(again: bool) -> None:
    replica = Replica("one", FakeServer(FakeEngine(gate=asyncio.Event())))
    tunnel = Tunnel(node_id=NODE, host="127.0.0.1")
    await tunnel.open()
    num_open = len(os.listdir("/proc/self/fd"))
    async with nothing_left():
        for moment in range(30):
            line = tunnel.open_channel()
            scope = {
                "type": "http",
                "method": "POST",
                "path": PATH,
                "query_string": b"",
                "headers": [(b"content-type", b"application/json")],
            }
            call = RelayedRequest(
                scope=scope,
                body=json.dumps(BODY).encode(),
                address=tunnel.address,
                secret=line.secret,
            )
            await cancelled(replica.relay.answer(call), moment, again=again)
            assert not replica.server.client.running
            await steps(10)
            line.close()
        await until(lambda: len(os.listdir("/proc/self/fd")) == num_open)
    tunnel.close()
    assert replica.server.client.requests


class Chunks:
    """A fake handle and its stream, which yields two chunks and then hangs."""

    def __init__(self) -> None:
        self.num_left = 2
        self.is_cancelled = False

    def options(self, **_options: Any) -> Chunks:
        return self

    def remote(self, _body: Any) -> Chunks:
        return self

    def __aiter__(self) -> Chunks:
        return self

    async def __anext__(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        if not self.num_left:
            await asyncio.Event().wait()
        self.num_left -= 1
        return {}

    def cancel(self) -> None:
        self.is_cancelled = True


async def read(front: Gateway, *, is_busy: bool) -> None:
    async with aclosing(front.chat_stream({})) as chunks:
        async for _ in chunks:
            await steps(50 * is_busy)


@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_stream_of_a_python_handle_ends_at_any_moment(is_busy: bool) -> None:
    async with nothing_left():
        for moment in range(1, 10):
            chunks = Chunks()
            front = object.__new__(Gateway)
            models: Any = {"a": SimpleNamespace(handle=chunks)}
            front._models = models
            await cancelled(read(front, is_busy=is_busy), moment)
            assert chunks.is_cancelled
