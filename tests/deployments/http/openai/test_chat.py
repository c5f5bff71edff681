"""Responses of /v1/chat/completions, byte for byte where clients depend on it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_plan
from tests.deployments.http.streams import events, prompt_of

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]


def make_body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, **fields}


async def post(body: dict[str, Any], server: FakeServer | None = None) -> httpx.Response:
    async with make_client(server) as client:
        return await client.post(PATH, json=body, headers={"x-request-id": "r1"})


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


async def test_a_stream_has_its_headers_and_one_id() -> None:
    response = await post(make_body(stream=True, max_tokens=2))

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "r1"
    assert len({(c["id"], c["created"], c["object"]) for c in events(response)}) == 1


async def test_continuous_usage_counts_along() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await post(make_body(stream=True, max_tokens=2, stream_options=options)))

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 2, 2]


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
    (choice,) = (await post(make_body(), FakeServer(FakeEngine(stopped_by="ri")))).json()["choices"]

    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "ri")


async def test_parts_are_joined_developers_are_the_system_and_last_messages_are_continued() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    server = FakeServer()

    await post(make_body(messages=messages), server)
    await post(make_body(messages=begun, continue_final_message=True), server)

    assert prompt_of(server, 0) == "<|system|>d<|user|>a\nb<|assistant|>"
    assert prompt_of(server, 1) == "<|user|>Hi<|assistant|>Well"


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
