"""What /v1/chat/completions answers, to the byte where clients depend on it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from remora.configs.errors import EngineError, QueueFull
from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_plan

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]


def make_body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, **fields}


async def post(body: dict[str, Any], server: FakeServer | None = None) -> httpx.Response:
    async with make_client(server) as client:
        return await client.post(PATH, json=body, headers={"x-request-id": "r1"})


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_more_logprobs_than_an_answer_may_hold_are_refused() -> None:
    asked = {"logprobs": True, "top_logprobs": 20, "n": 16, "max_tokens": 5000}
    body = {"messages": HELLO} | asked
    server = FakeServer(plan=make_plan(max_model_len=8192, num_pages=1024))
    async with make_client(server) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")


async def test_an_answer_holds_text_reason_and_usage() -> None:
    response = await post(make_body(max_tokens=4))

    body = response.json()
    body.pop("created")
    assert response.headers["x-request-id"] == "r1"
    assert body == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Pari", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 23,
            "completion_tokens": 4,
            "total_tokens": 27,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_a_stream_is_role_then_text_then_reason_then_done() -> None:
    response = await post(make_body(stream=True, max_tokens=2))

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "r1"
    chunks = events(response)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in chunk for chunk in chunks)
    blank = {"index": 0, "logprobs": None, "finish_reason": None}
    assert [chunk["choices"] for chunk in chunks] == [
        [blank | {"delta": {"role": "assistant", "content": ""}}],
        [blank | {"delta": {"content": "P"}}],
        [blank | {"delta": {"content": "a"}}],
        [blank | {"delta": {}, "finish_reason": "length", "stop_reason": None}],
    ]


async def test_usage_is_streamed_only_when_asked_for_and_last() -> None:
    options = {"include_usage": True}
    chunks = events(await post(make_body(stream=True, max_tokens=1, stream_options=options)))

    assert [chunk["usage"] for chunk in chunks[:-1]] == [None, None, None]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 24


async def test_continuous_usage_counts_along() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await post(make_body(stream=True, max_tokens=2, stream_options=options)))

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 2, 2]


async def test_the_two_answers_of_n_interleave_with_one_role_chunk_each() -> None:
    chunks = events(await post(make_body(stream=True, max_tokens=2, n=2)))

    shown = [(c["choices"][0]["index"], c["choices"][0]["delta"].get("content")) for c in chunks]
    assert shown == [
        (0, ""),
        (0, "P"),
        (1, ""),
        (1, "P"),
        (0, "a"),
        (0, None),
        (1, "a"),
        (1, None),
    ]


async def test_n_answers_come_by_index_and_count_the_prompt_once() -> None:
    body = (await post(make_body(n=3, max_tokens=2))).json()

    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == 23
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_logprobs_hold_bytes_and_the_likeliest_tokens_and_never_infinity() -> None:
    body = (await post(make_body(max_tokens=1, logprobs=True, top_logprobs=3))).json()

    assert body["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "P",
                "logprob": -0.5,
                "bytes": [80],
                "top_logprobs": [
                    {"token": "P", "logprob": -0.5, "bytes": [80]},
                    {"token": "!", "logprob": -1.5, "bytes": [33]},
                    {"token": '"', "logprob": -9999.0, "bytes": [34]},
                ],
            }
        ],
        "refusal": None,
    }


async def test_logprobs_can_name_tokens_by_id() -> None:
    body = make_body(max_tokens=1, logprobs=True, return_tokens_as_token_ids=True)
    content = (await post(body)).json()["choices"][0]["logprobs"]["content"]

    assert content[0]["token"] == "token_id:80"
    assert content[0]["top_logprobs"] == []


async def test_token_ids_come_on_request_streamed_or_not() -> None:
    whole = (await post(make_body(max_tokens=2, return_token_ids=True))).json()
    chunks = events(await post(make_body(max_tokens=2, return_token_ids=True, stream=True)))

    assert whole["choices"][0]["token_ids"] == [80, 97]
    assert len(whole["prompt_token_ids"]) == 23
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [c["choices"][0].get("token_ids") for c in chunks] == [None, [80], [97], None]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


async def test_prompt_logprobs_name_rank_and_text() -> None:
    body = (await post(make_body(max_tokens=1, prompt_logprobs=1))).json()

    lines = body["prompt_logprobs"]
    assert lines[0] is None
    assert lines[1] == {
        "33": {"logprob": -0.25, "rank": 1, "decoded_token": "!"},
        "124": {"logprob": -2.0, "rank": 7, "decoded_token": "|"},
    }
    assert len(lines) == 23


async def test_a_stop_string_is_reported() -> None:
    server = FakeServer(FakeEngine(stopped_by="ri"))
    body = (await post(make_body(), server)).json()

    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == "ri"


async def test_text_parts_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]
    server = FakeServer()

    await post(make_body(messages=messages, return_token_ids=True), server)

    prompt = "".join(map(chr, server.client.requests[0].prompt_ids))
    assert prompt == "<|system|>d<|user|>a\nb<|assistant|>"


async def test_a_final_message_can_be_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well"}]
    server = FakeServer()

    await post(make_body(messages=messages, continue_final_message=True), server)

    prompt = "".join(map(chr, server.client.requests[0].prompt_ids))
    assert prompt == "<|user|>Hi<|assistant|>Well"


async def test_the_model_may_be_left_out() -> None:
    assert (await post({"messages": HELLO})).status_code == 200


async def test_max_completion_tokens_wins_and_no_limit_means_none() -> None:
    server = FakeServer()

    await post(make_body(max_tokens=1, max_completion_tokens=3), server)
    await post(make_body(), server)

    assert [request.sampling.max_tokens for request in server.client.requests] == [3, None]


async def test_a_recommended_limit_never_makes_a_request_too_long() -> None:
    server = FakeServer(plan=make_plan(max_model_len=30), generation_defaults={"max_tokens": 500})

    response = await post(make_body(), server)

    assert response.status_code == 200
    assert server.client.requests[0].sampling.max_tokens == 7


async def test_a_refusal_is_a_status_also_for_streams() -> None:
    server = FakeServer(FakeEngine(error=QueueFull("Full.", 2.5)))

    response = await post(make_body(stream=True), server)

    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.headers["x-should-retry"] == "true"
    assert response.json()["error"]["code"] == "queue_full"


async def test_a_failure_after_the_first_token_is_an_event_then_done() -> None:
    server = FakeServer(FakeEngine(error=EngineError("page 7 of /secret"), fail_at=2))

    response = await post(make_body(stream=True), server)

    assert response.status_code == 200
    last = events(response)[-1]
    assert last["error"]["type"] == "server_error"
    assert "secret" not in response.text


async def test_an_aborted_call_ends_with_the_reason_abort() -> None:
    server = FakeServer(FakeEngine(gate=asyncio.Event()))
    async with make_client(server) as client:
        headers = {"x-request-id": "mine"}
        call = asyncio.create_task(client.post(PATH, json=make_body(), headers=headers))
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
        calls = [client.post(PATH, json=make_body(rid="same")) for _ in range(2)]
        responses = await asyncio.gather(*calls)

    assert [response.json()["id"] for response in responses] == ["chatcmpl-same"] * 2
    assert len({request.request_id for request in server.client.requests}) == 2


async def test_ignored_fields_are_reported_in_a_header() -> None:
    body = make_body(foo=1, user="me", stream=True, stream_options={"bar": 1}, tools=[])
    body["messages"] = [{"role": "user", "content": "Hi", "baz\n": 1}]

    response = await post(body)

    assert response.status_code == 200
    ignored = response.headers["x-remora-ignored-fields"]
    assert set(ignored.split(", ")) == {"foo", "stream_options.bar", "messages[0].baz?"}
