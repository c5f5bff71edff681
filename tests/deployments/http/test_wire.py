"""Bodies that do not come to their end."""

from __future__ import annotations

import logging

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from remora.deployments.http.errors import log_error
from remora.deployments.http.wire import read_bytes


async def test_a_client_that_leaves_while_it_sends_is_no_fault_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    with caplog.at_level(logging.ERROR), pytest.raises(HTTPException) as caught:
        await read_bytes(Request(scope, receive), 100, 5.0)
    log_error(caught.value, "r1")

    assert caught.value.status_code == 499
    assert caplog.records == []
