"""Rules of all golden streams, complete or disconnected: ids, usage, finish reasons, ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from remora.configs.errors import EngineError
from tests.deployments.fakes import make_client
from tests.deployments.http.core.test_disconnect import running
from tests.deployments.http.openai.test_golden import (
    PATH,
    check,
    events_of,
    golden,
    make_server,
    normal,
)


async def test_a_client_that_leaves_has_got_the_beginning_and_no_end() -> None:
    server = make_server(text="Paris.", gate=asyncio.Event())
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}

    async with running(server, PATH, body) as connection:
        connection.leave()
        await connection.task

    text = b"".join(m.get("body", b"") for m in connection.sent).decode()
    events = normal(events_of(text))
    for event in events:
        event["id"] = "chatcmpl-r1"  # the connection sends no id
    check_beginning("text", events)
    assert server.client.running == set()


def check_beginning(name: str, events: list[Any]) -> None:
    """Check that events are the beginning of a golden stream, but not all of it."""
    with pytest.raises(AssertionError):
        check(name, events)
    missing = golden(name)[len(events) :]
    assert events
    assert missing
    check(name, events + missing)


@pytest.mark.parametrize("fields", [{"n": 2}, {"stream_options": {"include_usage": True}}])
async def test_after_a_late_error_nothing_follows_that_looks_like_an_end(
    fields: dict[str, Any],
) -> None:
    server = make_server(text="Paris.", error=EngineError("x"), fail_at=2)
    async with make_client(server) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True} | fields
        response = await client.post(PATH, json=body)

    *events, error, end = events_of(response.text)
    assert error["error"]["code"] == "engine_failed"
    assert end == "[DONE]"
    assert all(piece["finish_reason"] is None for e in events for piece in e["choices"])
    assert not any(event.get("usage") for event in events)
