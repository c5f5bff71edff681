"""Messages to the client: each part once, the head first, and errors in a valid form."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from starlette.types import Message

from remora.configs.errors import Unavailable
from remora.deployments.gateway.client_side import ClientSide
from remora.deployments.gateway.wait_queue import Phase
from remora.deployments.http.core.wire_formats import ANTHROPIC, OLLAMA, OPENAI, RESPONSES, Dialect

STREAM = orjson.dumps({"status": 200, "headers": [("content-type", "text/event-stream")]})
REFUSAL = orjson.dumps({"status": 400, "headers": [("content-type", "application/json")]})
WRONG = b'{"error":{"message":"No.","type":"invalid_request_error","param":"n","code":"bad"}}'


class Client:
    """A client that accepts everything, unless it is stuck."""

    def __init__(
        self, dialect: Dialect = OPENAI, *, streams: bool = True, stall_s: float = 9.0
    ) -> None:
        self.is_stuck = False
        self.messages: list[Message] = []
        self.side = ClientSide(self._take, dialect, streams=streams, stall_s=stall_s)

    async def _take(self, message: Message) -> None:
        if self.is_stuck:
            await asyncio.Event().wait()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def statuses(self) -> list[int]:
        return [message["status"] for message in self.messages if "status" in message]


async def test_a_head_and_a_body_pass_through() -> None:
    client = Client()

    await client.side.pass_head(STREAM)
    await client.side.pass_body([b"data: 1\n\n", OPENAI.keep_alive, b"data: 2\n\n"])
    await client.side.end()

    assert client.statuses == [200]
    assert client.body == b"data: 1\n\n: keep-alive\n\ndata: 2\n\n"
    assert (client.side.num_events, client.side.num_bytes) == (2, 18)
    assert [message.get("more_body", True) for message in client.messages] == [True, True, False]


async def test_a_late_error_has_the_number_after_those_of_all_events() -> None:
    client = Client(RESPONSES)
    first, second, third = (b"event: e\ndata: {}\n\n" for _ in range(3))

    await client.side.pass_head(STREAM)
    await client.side.pass_body([first + second, third])
    await client.side.fail(Unavailable("No."))

    assert b'"sequence_number":3}' in client.body


async def test_a_stream_that_waited_has_one_head() -> None:
    client = Client()

    await client.side.report_phase(Phase.LOADING)
    await client.side.report_phase(Phase.READY)
    await client.side.pass_head(STREAM)

    assert client.statuses == [200]
    assert client.body.count(b": waiting for a replica") == 2
    assert not client.side.has_answer


async def test_others_wait_without_a_word() -> None:
    client = Client(streams=False)

    await client.side.report_phase(Phase.LOADING)

    assert client.messages == []


@pytest.mark.parametrize(
    ("dialect", "body", "event"),
    [
        (OPENAI, WRONG, b"data: " + WRONG + b"\n\ndata: [DONE]\n\n"),
        (ANTHROPIC, b'{"type":"error"}', b'event: error\ndata: {"type":"error"}\n\n'),
        (
            RESPONSES,
            WRONG,
            b'event: error\ndata: {"type":"error","code":"bad","message":"No.","param":"n",'
            b'"sequence_number":0}\n\n',
        ),
    ],
)
async def test_a_refusal_after_the_head_is_an_event(
    dialect: Dialect, body: bytes, event: bytes
) -> None:
    client = Client(dialect)

    await client.side.report_phase(Phase.PLACING)
    await client.side.pass_head(REFUSAL)
    await client.side.pass_body([body[:5], body[5:]])
    await client.side.end()

    assert client.statuses == [200]
    assert client.body.partition(b"\n\n")[2] == event


LINES = orjson.dumps({"status": 200, "headers": [("content-type", "application/x-ndjson")]})


@pytest.mark.parametrize(
    ("dialect", "head", "parts", "body"),
    [
        pytest.param(OPENAI, STREAM, [], b'data: {"error":', id="no event"),
        pytest.param(
            OPENAI,
            STREAM,
            [b'data: {"text":"so fa'],
            b'data: {"text":"so fa\n\ndata: {"error":',
            id="an event that broke off",
        ),
        pytest.param(
            OPENAI,
            STREAM,
            [b"data: 1\n", b"\n"],
            b'data: 1\n\ndata: {"error":',
            id="an event that is cut between its ends",
        ),
        pytest.param(
            OLLAMA,
            LINES,
            [b'{"response":"a"}\n', b'{"respo'],
            b'{"response":"a"}\n{"respo\n{"error":"It has died."',
            id="a line that broke off",
        ),
    ],
)
async def test_a_failure_ends_a_stream_with_an_event_of_its_own(
    dialect: Dialect, head: bytes, parts: list[bytes], body: bytes
) -> None:
    client = Client(dialect)

    await client.side.pass_head(head)
    for part in parts:
        await client.side.pass_body([part])
    await client.side.report_phase(Phase.LOADING)
    await client.side.fail(Unavailable("It has died."))

    waiting = b": waiting for a replica (loading)\n\n"
    assert client.body.replace(waiting, b"").startswith(body)
    assert b"It has died." in client.body
    assert client.body.endswith(b"\n" if dialect is OLLAMA else b"\n\ndata: [DONE]\n\n")
    assert client.messages[-1]["more_body"] is False


@pytest.mark.parametrize("at_end", [False, True])
async def test_a_client_that_takes_nothing_is_given_up(at_end: bool) -> None:
    client = Client(stall_s=0.01)
    await client.side.pass_head(STREAM)
    client.is_stuck = True

    async with asyncio.timeout(5):
        with pytest.raises(TimeoutError):
            await (client.side.end() if at_end else client.side.pass_body([b"data: 1\n\n"]))
    assert client.messages[-1]["type"] == "http.response.start"
