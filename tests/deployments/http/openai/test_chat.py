"""Requests to /v1/chat/completions: prompts, limits, aborts and ids."""

from __future__ import annotations

import asyncio

from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_plan
from tests.deployments.http.streams import ask, prompt_of

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]


async def test_parts_are_joined_developers_are_the_system_and_last_messages_are_continued() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    server = FakeServer()

    await ask(PATH, server, messages=messages)
    await ask(PATH, server, messages=begun, continue_final_message=True)

    assert prompt_of(server, 0) == "<|system|>d<|user|>a\nb<|assistant|>"
    assert prompt_of(server, 1) == "<|user|>Hi<|assistant|>Well"


async def test_a_recommended_limit_never_makes_a_request_too_long() -> None:
    server = FakeServer(plan=make_plan(max_model_len=30), generation_defaults={"max_tokens": 500})

    response = await ask(PATH, server, messages=HELLO)

    assert response.status_code == 200
    assert server.client.requests[0].sampling.max_tokens == 7


async def test_an_aborted_call_ends_with_the_reason_abort() -> None:
    server = FakeServer(FakeEngine(gate=asyncio.Event()))
    async with make_client(server) as client:
        headers = {"x-request-id": "mine"}
        call = asyncio.create_task(client.post(PATH, json={"messages": HELLO}, headers=headers))
        while not server.client.running:
            await asyncio.sleep(0)
        unknown = await client.post("/abort_request", json={"rid": "other"})
        aborted = await client.post("/abort_request", json={"rid": "chatcmpl-mine"})
        response = await call

    assert unknown.json() == {"num_aborted": 0}
    assert aborted.json() == {"num_aborted": 1}
    assert response.json()["choices"][0]["finish_reason"] == "abort"


async def test_callers_may_use_one_request_id_twice_at_a_time() -> None:
    server = FakeServer()
    async with make_client(server) as client:
        calls = [client.post(PATH, json={"messages": HELLO, "rid": "same"}) for _ in range(2)]
        responses = await asyncio.gather(*calls)

    assert [response.json()["id"] for response in responses] == ["chatcmpl-same"] * 2
    assert len({request.request_id for request in server.client.requests}) == 2


async def test_ignored_fields_are_reported_in_a_header() -> None:
    messages = [{"role": "user", "content": "Hi", "baz\n": 1}]
    fields = {"foo": 1, "user": "me", "stream": True, "stream_options": {"bar": 1}, "tools": []}

    response = await ask(PATH, messages=messages, **fields)

    assert response.status_code == 200
    ignored = response.headers["x-remora-ignored-fields"]
    assert set(ignored.split(", ")) == {"foo", "stream_options.bar", "messages[0].baz?"}
