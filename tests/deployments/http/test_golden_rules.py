"""What holds in each golden stream, and in one whose client leaves: ids, usage, reasons, ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from remora.configs.errors import EngineError, InvalidRequest
from tests.deployments.fakes import FakeServer, make_client
from tests.deployments.http.core.test_disconnect import running
from tests.deployments.http.test_golden import (
    CASES,
    GOLDEN,
    PATH,
    check,
    events_of,
    make_server,
    normal,
    stream,
)

EXPECTED_REASONS = {
    "length": {"length"},
    "reasoning_cut_off": {"length"},
    "tools_cut_off": {"length"},
    "tools": {"tool_calls"},
    "reasoning_and_tools": {"tool_calls"},
    "required_tools": {"tool_calls"},
}


@pytest.mark.parametrize("name", CASES)
async def test_ids_reasons_and_usage_are_right(name: str) -> None:
    text, fields = CASES[name]
    server = make_server(text=text)

    response = await stream(server, **fields)

    *chunks, end = events_of(response.text)
    n = fields.get("n", 1)
    assert end == "[DONE]"
    assert response.headers["x-request-id"] == "r1"
    for key, value in (("id", "chatcmpl-r1"), ("model", "tiny"), ("created", chunks[0]["created"])):
        assert {chunk[key] for chunk in chunks} == {value}
    pieces = [piece for chunk in chunks for piece in chunk["choices"]]
    assert {piece["index"] for piece in pieces} == set(range(n))
    reasons = [piece["finish_reason"] for piece in pieces if piece["finish_reason"]]
    assert len(reasons) == n
    assert set(reasons) == EXPECTED_REASONS.get(name, {"stop"})
    ids = [
        call["id"]
        for piece in pieces
        for call in piece["delta"].get("tool_calls", ())
        if "id" in call
    ]
    assert len(set(ids)) == len(ids)
    check_usage(chunks, server, asked="stream_options" in fields, n=n)


def check_usage(chunks: list[Any], server: FakeServer, *, asked: bool, n: int) -> None:
    told = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len(told) == asked
    for usage in told:
        assert chunks[-1]["usage"] == usage
        assert chunks[-1]["choices"] == []
        num_prompt = len(server.client.requests[0].prompt_ids)
        room = server.client.requests[0].sampling.max_tokens
        num_output = len(server.client.text[: room or None]) * n
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_output)
        assert usage["total_tokens"] == num_prompt + num_output
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
        text = server.client.text[: room or None]
        thought = text.partition("</think>")
        within = (len(thought[0]) + len(thought[1])) * n if "<think>" in text else 0
        assert usage["completion_tokens_details"] == {"reasoning_tokens": within}


async def test_a_client_that_leaves_has_got_the_beginning_and_no_end() -> None:
    server = make_server(text="Paris.", gate=asyncio.Event())
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}

    async with running(server, PATH, body) as connection:
        connection.leave()
        await connection.task

    text = b"".join(m.get("body", b"") for m in connection.sent).decode()
    events = normal(events_of(text))
    for event in events:
        event["id"] = "chatcmpl-r1"  # the connection has named none
    check_beginning("text", events)
    assert server.client.running == set()


def check_beginning(name: str, events: list[Any]) -> None:
    """Check that events are the first ones of a golden stream, and not all."""
    with pytest.raises(AssertionError):
        check(name, events)
    missing = golden(name)[len(events) :]
    assert events
    assert missing
    check(name, events + missing)


def golden(name: str) -> list[Any]:
    return [json.loads(line) for line in (GOLDEN / f"{name}.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(EngineError("x"), 500, "engine_failed"), (InvalidRequest("no", "n"), 400, "invalid_value")],
)
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}])
async def test_an_error_before_the_first_token_has_a_status_whatever_was_asked(
    error: Exception, status: int, code: str, fields: dict[str, Any]
) -> None:
    response = await stream(make_server(error=error), **fields)

    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.headers["content-type"] == "application/json"


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
