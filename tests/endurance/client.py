"""A client that writes down what it received, and judges nothing."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

from tests.endurance.traffic import Ask

DONE = "[DONE]"


class End(StrEnum):
    """How an answer ended, as HTTP and the event stream say."""

    COMPLETE = "complete"  # the whole body, or [DONE]
    UNFINISHED = "unfinished"  # HTTP says that all has arrived, but there was no [DONE]
    CLOSED = "closed"  # the connection closed before the end of the answer
    UNREACHED = "unreached"  # no connection
    LEFT = "left"  # the client closed the connection
    TIMEOUT = "timeout"
    UNREADABLE = "unreadable"  # neither JSON nor events of the API


@dataclass(slots=True)
class Choice:
    """One of an answer's choices, or its vectors as text."""

    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish_reason: str | None = None


@dataclass(slots=True)
class Seen:
    """What the client of one request saw. Times are of the monotonic clock.

    name:      of the request
    rid:       its x-request-id
    error:     the `error` object of the body or of an event
    problems:  what no server may send, such as events after [DONE]
    """

    name: str
    rid: str
    began_at: float
    ended_at: float = 0.0
    first_at: float | None = None
    status: int | None = None
    may_retry: bool | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    end: End = End.TIMEOUT
    problems: list[str] = field(default_factory=list)
    detail: str = ""


async def perform(
    client: httpx.AsyncClient,
    ask: Ask,
    rid: str,
    *,
    timeout_s: float,
    leaves_after: int | None = None,
) -> Seen:
    """Send a request and read its answer.

    leaves_after:  number of events (of a whole answer: hundredths of a second) after which the
                   client closes the connection
    """
    seen = Seen(ask.name, rid, time.monotonic())
    try:
        async with asyncio.timeout(timeout_s):
            await _read(client, ask, seen, leaves_after)
    except TimeoutError:
        seen.end = End.TIMEOUT
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        seen.end, seen.detail = End.UNREACHED, repr(error)
    except httpx.TransportError as error:
        seen.end, seen.detail = End.CLOSED, repr(error)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        seen.end, seen.detail = End.UNREADABLE, repr(error)
    seen.ended_at = time.monotonic()
    return seen


async def _read(client: httpx.AsyncClient, ask: Ask, seen: Seen, leaves_after: int | None) -> None:
    headers = {"x-request-id": seen.rid}
    if leaves_after is not None and not ask.is_stream:
        try:
            async with asyncio.timeout(leaves_after / 100):
                await client.post(ask.path, json=ask.body, headers=headers)
        except TimeoutError:
            pass
        seen.end = End.LEFT
        return
    async with client.stream("POST", ask.path, json=ask.body, headers=headers) as response:
        seen.status = response.status_code
        retry = response.headers.get("x-should-retry")
        seen.may_retry = None if retry is None else retry == "true"
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            await _read_events(response, seen, leaves_after)
        else:
            body = await response.aread()
            seen.first_at = time.monotonic()
            _take_whole(json.loads(body), seen)
            seen.end = End.COMPLETE


async def _read_events(response: httpx.Response, seen: Seen, leaves_after: int | None) -> None:
    num_events, last = 0, ""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            if line and not line.startswith(":"):
                seen.problems.append(f"a line that is no event: {line[:80]}")
            continue
        if last == DONE:
            seen.problems.append(f"an event after [DONE]: {line[:80]}")
            continue
        last = line.removeprefix("data:").strip()
        if last == DONE:
            continue
        seen.first_at = seen.first_at or time.monotonic()
        if seen.error is not None:
            seen.problems.append(f"an event after an error: {line[:80]}")
        _take_event(json.loads(last), seen)
        num_events += 1
        if leaves_after is not None and num_events > leaves_after:
            seen.end = End.LEFT
            return
    seen.end = End.COMPLETE if last == DONE else End.UNFINISHED


def _take_whole(body: dict[str, Any], seen: Seen) -> None:
    if "error" in body:
        seen.error = dict(body["error"])
        return
    if "data" in body:
        seen.choices[0] = Choice(text=json.dumps([entry["embedding"] for entry in body["data"]]))
        return
    for choice in body["choices"]:
        found = seen.choices.setdefault(choice["index"], Choice())
        found.finish_reason = choice["finish_reason"]
        message = choice.get("message")
        found.text = choice["text"] if message is None else message.get("content") or ""
        for number, call in enumerate((message or {}).get("tool_calls") or []):
            found.calls[number] = [call["function"]["name"], call["function"]["arguments"]]
    seen.usage = body.get("usage")


def _take_event(event: dict[str, Any], seen: Seen) -> None:
    if "error" in event:
        seen.error = dict(event["error"])
        return
    for choice in event["choices"]:
        found = seen.choices.setdefault(choice["index"], Choice())
        delta = choice.get("delta")
        text = choice["text"] if delta is None else delta.get("content") or ""
        if found.finish_reason is not None and text:
            seen.problems.append(f"text after a finish reason: {text[:80]}")
        found.text += text
        for call in (delta or {}).get("tool_calls") or []:
            parts = found.calls.setdefault(call["index"], ["", ""])
            function = call.get("function") or {}
            parts[0] += function.get("name") or ""
            parts[1] += function.get("arguments") or ""
        found.finish_reason = choice.get("finish_reason") or found.finish_reason
