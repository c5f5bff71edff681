"""Streams during a disturbance, and a verdict on each.

Every stream is greedy, and its text is known from an undisturbed run. A stream must either be
exactly that text, or fail in a way that a client can detect and retry. Anything else is a defect
of the server: `Verdict.WRONG`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

DONE = "[DONE]"


class Verdict(StrEnum):
    """The outcome of a stream."""

    WHOLE = "whole"
    REFUSED = "refused"  # before it started, and retriable
    BROKEN = "broken"  # during the stream, by the connection or an error event
    WRONG = "wrong"  # a different text, or truncated without an error


@dataclass(slots=True)
class Stream:
    """One stream as seen by its client. Times are of the monotonic clock."""

    number: int
    began_at: float
    text: str = ""
    first_at: float | None = None
    ended_at: float | None = None
    status: int | None = None
    error: str | None = None
    verdict: Verdict | None = None


def make_body(number: int, num_tokens: int) -> dict[str, Any]:
    """Return a greedy completion that is unique to `number`."""
    prompt = f"Number {number}: the quick brown fox jumps over {number * 7919 % 1000}"
    return {
        "prompt": prompt,
        "temperature": 0,
        "seed": number,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }


@dataclass(eq=False)
class Load:
    """Streams against one server.

    expected:  text by number; filled by `learn`
    """

    url: str
    num_tokens: int
    expected: dict[int, str] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)
    _client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Load:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._client = httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._client is not None
        await self._client.aclose()

    async def learn(self, numbers: range) -> None:
        """Record the expected texts, without a disturbance."""
        streams = await asyncio.gather(*(self.stream(number) for number in numbers))
        assert all(stream.error is None for stream in streams), streams
        self.expected.update({stream.number: stream.text for stream in streams})
        self.streams.clear()

    async def stream(self, number: int) -> Stream:
        """Run one stream to its end."""
        assert self._client is not None
        stream = Stream(number, time.monotonic())
        self.streams.append(stream)
        body = make_body(number, self.num_tokens)
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                stream.status = response.status_code
                if response.status_code == 200:
                    await self._read(stream, response)
                else:
                    await response.aread()
                    stream.error = response.text
                    stream.verdict = _of_refusal(response)
        except httpx.ConnectError as error:
            stream.error = repr(error)
            stream.verdict = Verdict.REFUSED
        except httpx.TransportError as error:
            stream.error = repr(error)
            stream.verdict = Verdict.BROKEN
        stream.ended_at = time.monotonic()
        return stream

    async def _read(self, stream: Stream, response: httpx.Response) -> None:
        last = ""
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            last = line.removeprefix("data: ")
            if last == DONE:
                continue
            stream.first_at = stream.first_at or time.monotonic()
            event = json.loads(last)
            if "error" in event:
                stream.error = json.dumps(event)
            else:
                stream.text += event["choices"][0]["text"]
        if stream.error is not None:
            stream.verdict = Verdict.BROKEN
        elif last != DONE:
            stream.error, stream.verdict = "ended without [DONE] or an error", Verdict.WRONG
        else:
            stream.verdict = self._of_text(stream)

    def _of_text(self, stream: Stream) -> Verdict:
        expected = self.expected.get(stream.number)
        return Verdict.WHOLE if expected in (None, stream.text) else Verdict.WRONG

    async def keep_up(self, numbers: range, until: asyncio.Event) -> None:
        """Repeat these streams concurrently until the event is set."""

        async def repeat(number: int) -> None:
            while not until.is_set():
                stream = await self.stream(number)
                if stream.verdict is not Verdict.WHOLE:
                    await asyncio.sleep(0.2)

        await asyncio.gather(*(repeat(number) for number in numbers))

    @property
    def running(self) -> list[Stream]:
        """Streams that have started and not ended."""
        return [s for s in self.streams if s.first_at is not None and s.ended_at is None]

    def verdicts(self, streams: list[Stream] | None = None) -> Mapping[str, int]:
        """Count the verdicts of streams."""
        return Counter(str(s.verdict) for s in streams or self.streams)


def _of_refusal(response: httpx.Response) -> Verdict:
    """Return the verdict on an error response, which must be well-formed and retriable."""
    try:
        kind = response.json()["error"]["type"]
    except (ValueError, KeyError, TypeError):
        return Verdict.WRONG
    may_retry = response.headers.get("x-should-retry") == "true"
    known = kind in ("overloaded_error", "server_error", "rate_limit_error")
    return Verdict.REFUSED if may_retry and known else Verdict.WRONG
