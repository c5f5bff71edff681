"""Incomplete bodies."""

from __future__ import annotations

import logging

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from remora.deployments.http.batches import upload as files_upload
from remora.deployments.http.core.errors import log_error
from remora.deployments.http.core.wire import read_bytes
from tests.moments import nothing_left


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


async def receive_much() -> Message:
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    return {"type": "http.request", "body": part, "more_body": True}


async def test_a_body_that_is_refused_amid_it_is_read_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files_upload, "MAX_UPLOAD_BYTES", 100)
    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    async with nothing_left():
        for reading in (
            read_bytes(Request(scope, receive_much), 100, 5.0),
            files_upload.read_upload(Request(scope, receive_much)),
        ):
            with pytest.raises(HTTPException) as caught:
                await reading
            assert caught.value.status_code == 413
