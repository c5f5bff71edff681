"""Conformance tables: a request, and the status and shape of its answer or of its events.

A shape is a value that the answer must equal, a type that it must have, Any, a list or an object.
A list must match item by item; an object names keys that the answer must have, and with ABSENT
those that it must not have.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import httpx

from tests.deployments.fakes import FakeServer, make_client

ABSENT = object()


class Row(NamedTuple):
    """One request of a table.

    source:  where the peer's documentation or tests describe it
    answer:  shape of the whole answer; of a stream: the shapes of its events, in order
    """

    source: str
    path: str
    body: dict[str, Any] | None
    status: int
    answer: Any


async def check_row(row: Row, server: FakeServer) -> None:
    """Send the request of a row (a GET if it has no body), and compare the answer."""
    method = "GET" if row.body is None else "POST"
    async with make_client(server) as client:
        response = await client.request(method, row.path, json=row.body)
    assert response.status_code == row.status, response.text
    check_shape(content_of(response), row.answer)


def content_of(response: httpx.Response) -> Any:
    """Return the parsed answer; of a stream, its events, an end marker as its text."""
    kind = response.headers.get("content-type", "")
    text = response.text.replace("\r\n", "\n")
    if kind.startswith("text/event-stream"):
        frames = [frame.split("data:", 1)[1].strip() for frame in text.split("\n\n") if frame]
        return [json.loads(data) if data.startswith("{") else data for data in frames]
    if kind.startswith("application/x-ndjson"):
        return [json.loads(line) for line in text.splitlines()]
    return response.json() if kind.startswith("application/json") else text


def check_shape(found: Any, shape: Any, place: str = "answer") -> None:
    """Assert that a value has a shape; `place` names the value in the message."""
    if shape is Any:
        return
    if isinstance(shape, type):
        kinds = (int, float) if shape is float else shape
        assert isinstance(found, kinds), f"{place} is {found!r}, expected {shape.__name__}"
        assert shape is bool or not isinstance(found, bool), f"{place} is {found!r}"
    elif isinstance(shape, dict):
        assert isinstance(found, dict), f"{place} is {found!r}, expected an object"
        for key, inner in shape.items():
            if inner is ABSENT:
                assert key not in found, f"{place} has {key}"
            else:
                assert key in found, f"{place} lacks {key}: {sorted(found)}"
                check_shape(found[key], inner, f"{place}.{key}")
    elif isinstance(shape, list):
        assert isinstance(found, list), f"{place} is {found!r}, expected a list"
        assert len(found) == len(shape), f"{place} has {len(found)} items: {found!r}"
        for number, (item, inner) in enumerate(zip(found, shape, strict=True)):
            check_shape(item, inner, f"{place}[{number}]")
    else:
        assert found == shape, f"{place} is {found!r}, expected {shape!r}"
