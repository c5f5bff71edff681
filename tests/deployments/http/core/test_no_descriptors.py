"""Requests are answered while the process can open no file or connection."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.deployments.fakes import client_of, make_app

HELLO = [{"role": "user", "content": "Hi"}]


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no more files within the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held[0], *_descriptors()) + 1, hard))
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "ab", "n": 2}),
        ("/v1/responses", {"input": "ab"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 4}),
        ("/api/chat", {"messages": HELLO}),
        ("/generate", {"text": "ab"}),
        ("/generate", {"inputs": "ab"}),
        ("/completion", {"prompt": "ab"}),
        ("/v2/chat", {"messages": HELLO, "model": "tiny"}),
        ("/inference/v1/generate", {"token_ids": [65], "sampling_params": {}}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_generation_opens_no_file(path: str, body: dict[str, Any], stream: bool) -> None:
    async with client_of(make_app()) as client:
        asked = body | {"stream": stream}
        before = await client.post(path, json=asked)  # modules are imported by the first request
        with no_descriptors():
            after = await client.post(path, json=asked)

    assert (before.status_code, after.status_code) == (200, 200), after.text


async def test_work_that_has_to_open_a_file_is_refused_as_long_as_there_is_none() -> None:
    async def open_one() -> None:
        os.close(os.open("/dev/null", os.O_RDONLY))

    app = make_app()
    app.add_api_route("/opens", open_one)
    async with client_of(app) as client:
        with no_descriptors():
            refused = await client.get("/opens")

    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "overloaded_error"
