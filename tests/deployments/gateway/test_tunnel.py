"""The socket between replica and gateway: immediate, with backpressure, and authenticated."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from remora.deployments.gateway.frames import SECRET_BYTES, Frame, Kind
from remora.deployments.gateway.relay import Relay
from remora.deployments.gateway.relayed_request import (
    Address,
    GatewayUnreachable,
    RelayedRequest,
)
from remora.deployments.gateway.tunnel import AnswerChannel, CutOff, Tunnel

PIECE = b"x" * 10_000
SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}


class Speaker:
    """An application that sends pieces while the client is connected; `num_said` counts them."""

    def __init__(self, num_pieces: int = 10**9) -> None:
        self.num_said = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.was_left = asyncio.Event()
        self._num_pieces = num_pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        gone = asyncio.ensure_future(receive())
        try:
            while self.num_said < self._num_pieces and not gone.done():
                await send({"type": "http.response.body", "body": PIECE, "more_body": True})
                self.num_said += 1
                await self.go_on.wait()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self.was_left.set()


@pytest.fixture
async def tunnel() -> AsyncIterator[Tunnel]:
    tunnel = Tunnel(node_id="here", host="127.0.0.1")
    await tunnel.open()
    yield tunnel
    tunnel.close()
    await asyncio.sleep(0.01)  # transports close in later iterations of the loop


def start(tunnel: Tunnel, line: AnswerChannel, app: ASGIApp) -> asyncio.Task[None]:
    relay = Relay(lambda: app, lambda: None, own_ids=lambda: ("here", "one"))
    call = RelayedRequest(scope=SCOPE, body=b"", address=tunnel.address, secret=line.secret)
    return asyncio.create_task(relay.answer(call))


async def read_on(line: AnswerChannel) -> None:
    while True:
        await line.read()


async def test_the_first_piece_comes_before_the_second_is_made(tunnel: Tunnel) -> None:
    line, app = tunnel.open_channel(), Speaker()
    app.go_on.clear()
    task = start(tunnel, line, app)

    frames: list[Frame] = []
    while Kind.BODY not in [frame.kind for frame in frames]:
        frames += await line.read()

    assert (app.num_said, line.replica) == (1, "one")
    line.close()
    app.go_on.set()
    await task


async def test_a_replica_gets_no_further_ahead_than_the_sockets_hold(tunnel: Tunnel) -> None:
    line, app = tunnel.open_channel(), Speaker()
    task = start(tunnel, line, app)
    await line.read()

    said = -1
    while said != app.num_said:
        said = app.num_said
        await asyncio.sleep(0.1)

    assert said * len(PIECE) < 4 * 2**20
    line.close()
    async with asyncio.timeout(5):
        await app.was_left.wait()
        await task


async def test_a_whole_answer_has_its_end_and_a_cancelled_one_has_not(tunnel: Tunnel) -> None:
    whole, broken = tunnel.open_channel(), tunnel.open_channel()
    tasks = [start(tunnel, whole, Speaker(3)), start(tunnel, broken, stuck := Speaker(3))]
    stuck.go_on.clear()

    frames = await whole.read()
    while frames[-1].kind is not Kind.END:
        frames += await whole.read()
    await broken.read()
    tasks[1].cancel()

    assert sum(len(f.payload) for f in frames if f.kind is Kind.BODY) == 3 * len(PIECE)
    with pytest.raises(CutOff):
        await read_on(broken)


async def test_who_answers_a_gateway_that_has_left_is_told(tunnel: Tunnel) -> None:
    line, errors = tunnel.open_channel(), list[Exception]()
    loop = asyncio.get_running_loop()

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass
        deadline = loop.time() + 5
        try:
            while loop.time() < deadline:
                await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        except ConnectionError as error:
            errors.append(error)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    task = start(tunnel, line, app)
    await line.read()
    line.close()
    await task

    assert len(errors) == 1


async def test_strangers_are_hung_up_on(tunnel: Tunnel) -> None:
    line = tunnel.open_channel()
    hellos = [
        bytes(Frame(Kind.HELLO, b"?" * SECRET_BYTES)),
        bytes(Frame(Kind.HELLO, line.secret[:-1])),
        bytes(Frame(Kind.BODY, line.secret)),
        b"GET / HTTP/1.1\r\n\r\n",
    ]

    for hello in hellos:
        reader, writer = await asyncio.open_unix_connection(tunnel.address.path)
        writer.write(hello)
        async with asyncio.timeout(5):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()

    assert line.replica is None


async def test_an_answer_that_has_begun_cannot_be_taken_over(tunnel: Tunnel) -> None:
    line, app = tunnel.open_channel(), Speaker()
    app.go_on.clear()
    task = start(tunnel, line, app)
    await line.read()

    other = start(tunnel, line, second := Speaker())
    async with asyncio.timeout(5):
        await second.was_left.wait()
        await other
    line.close()
    app.go_on.set()
    await task

    assert app.num_said <= 2


async def test_many_replicas_connect_at_once_to_a_gateway_that_is_busy(tunnel: Tunnel) -> None:
    lines = [tunnel.open_channel() for _ in range(300)]
    tasks = [start(tunnel, line, Speaker(0)) for line in lines]  # before any is accepted
    async with asyncio.timeout(10):
        await asyncio.gather(*(line.taken() for line in lines), *tasks)
    for line in lines:
        line.close()


async def test_a_connection_that_the_gateway_never_accepts_is_an_error(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "answers"))
        listener.listen(0)
        address = Address(node_id="here", path=str(tmp_path / "answers"))
        call = RelayedRequest(scope=SCOPE, body=b"", address=address, secret=b"?" * SECRET_BYTES)
        relay = Relay(lambda: Speaker(0), lambda: None, own_ids=lambda: ("here", "one"))
        calls = [asyncio.create_task(relay.answer(call)) for _ in range(2)]
        done, _ = await asyncio.wait(calls, timeout=5, return_when=asyncio.FIRST_EXCEPTION)
        for task in calls:
            task.cancel()

    assert [type(task.exception()) for task in done if task.exception()] == [GatewayUnreachable]
