"""Requests to a fake server, and readers of streamed replies and of the engine's prompts."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.deployments.fakes import FakeServer, make_client


async def ask(path: str, server: FakeServer | None = None, /, **body: Any) -> httpx.Response:
    """Send a body under the request id r1."""
    async with make_client(server) as client:
        return await client.post(path, json=body, headers={"x-request-id": "r1"})


def events(response: httpx.Response) -> list[Any]:
    """Return the data of an OpenAI-style stream, which ends with [DONE]."""
    frames = [frame for frame in response.text.split("\n\n") if frame]
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


def prompt_of(server: FakeServer, number: int = 0) -> str:
    """Return the prompt of one of the engine's requests."""
    return "".join(map(chr, server.client.requests[number].prompt_ids))
