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


async def test_a_failure_ends_a_stream_with_an_event() -> None:
    client = Client()

    await client.side.pass_head(STREAM)
    await client.side.fail(Unavailable("It has died."))

    assert b'"message":"It has died."' in client.body
    assert client.messages[-1]["more_body"] is False


async def test_an_error_is_not_written_into_an_event_that_broke_off() -> None:
    client = Client()

    await client.side.pass_head(STREAM)
    await client.side.pass_body([b'data: {"text":"so fa'])
    await client.side.report_phase(Phase.LOADING)
    await client.side.fail(Unavailable("It has died."))

    broken, event, last, end = client.body.split(b"\n\n")
    assert broken == b'data: {"text":"so fa'
    assert event.startswith(b'data: {"error":')
    assert (last, end) == (b"data: [DONE]", b"")


async def test_an_error_stands_on_a_line_of_its_own() -> None:
    client = Client(OLLAMA)
    head = {"status": 200, "headers": [("content-type", "application/x-ndjson")]}

    await client.side.pass_head(orjson.dumps(head))
    await client.side.pass_body([b'{"response":"a"}\n', b'{"respo'])
    await client.side.fail(Unavailable("It has died."))

    lines = client.body.splitlines()
    assert lines[:2] == [b'{"response":"a"}', b'{"respo']
    assert orjson.loads(lines[2])["error"] == "It has died."


async def test_events_that_are_cut_between_their_ends_are_whole() -> None:
    client = Client()

    await client.side.pass_head(STREAM)
    await client.side.pass_body([b"data: 1\n"])
    await client.side.pass_body([b"\n"])
    await client.side.fail(Unavailable("It has died."))

    assert client.body.startswith(b'data: 1\n\ndata: {"error":')


async def test_a_client_that_takes_nothing_is_given_up() -> None:
    client = Client(stall_s=0.01)
    await client.side.pass_head(STREAM)
    client.is_stuck = True

    with pytest.raises(TimeoutError):
        await client.side.pass_body([b"data: 1\n\n"])


async def test_a_client_that_does_not_take_the_end_is_given_up() -> None:
    client = Client(stall_s=0.01)
    await client.side.pass_head(STREAM)
    client.is_stuck = True

    async with asyncio.timeout(5):
        with pytest.raises(TimeoutError):
            await client.side.end()
    assert client.messages[-1]["type"] == "http.response.start"
