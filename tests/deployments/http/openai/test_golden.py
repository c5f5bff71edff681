"""Replies of /v1/chat/completions, whole and streamed, unchanged over time.

The expected replies are in `golden.json`. A change there is a change for every client.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.configs.errors import EngineError
from tests.deployments.fakes import FakeEngine, FakeServer, make_config
from tests.deployments.http.core.test_disconnect import running
from tests.deployments.http.golden import check_golden, event_of, normal
from tests.deployments.http.streams import ask, events

HERE = Path(__file__).parent
PATH = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
NUMBER_A = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": NUMBER_A}}
SUB = {"type": "function", "function": {"name": "sub", "parameters": NUMBER_A}}
CALLS = (
    'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
)
FORCED = 'x</think>[{"name": "add", "parameters": {"a": 1}}, {"name": "sub", "parameters": {}}]'
THOUGHT = "<think>2+2</think>4"
USAGE = {"stream_options": {"include_usage": True}}
USAGE_OF_EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def parsing(text: str, **api: Any) -> FakeServer:
    """Return a server whose model has formats of calls and of reasoning."""
    config = make_config(**{"tool_parser": "hermes", "reasoning_parser": "qwen3"} | api)
    return FakeServer(FakeEngine(text=text), config=config)


def plain(**engine: Any) -> FakeServer:
    return FakeServer(FakeEngine(**engine))


CASES: dict[str, tuple[FakeServer, dict[str, Any]]] = {
    "text": (plain(), {"max_tokens": 4} | USAGE),
    "text of three": (plain(text="Yes"), {"n": 3}),
    "usage of each event": (plain(text="Yes"), USAGE_OF_EACH),
    "stop text": (plain(stopped_by="ri"), {}),
    "logprobs": (plain(), {"max_tokens": 1, "logprobs": True, "top_logprobs": 3}),
    "logprobs by id": (
        plain(),
        {"max_tokens": 1, "logprobs": True, "return_tokens_as_token_ids": True},
    ),
    "token ids": (plain(), {"max_tokens": 2, "return_token_ids": True}),
    "prompt text": (plain(), {"max_tokens": 1, "return_prompt_text": True}),
    "tier": (plain(), {"max_tokens": 1, "service_tier": "auto"}),
    "reasoning": (parsing("<think>\n2+2\n</think>\n\n4"), USAGE),
    "reasoning under both names": (parsing(THOUGHT, reasoning_field="both"), {}),
    "reasoning under the old name": (parsing(THOUGHT, reasoning_field="reasoning_content"), {}),
    "reasoning in one piece": (parsing(THOUGHT), {"stream_reasoning": False}),
    "reasoning left out": (parsing(THOUGHT), {"include_reasoning": False}),
    "reasoning in the text": (parsing(THOUGHT), {"separate_reasoning": False}),
    "reasoning cut off": (parsing(THOUGHT), {"max_tokens": 9} | USAGE),
    "tools": (parsing(CALLS), {"tools": [ADD]} | USAGE),
    "tools cut off": (parsing(CALLS), {"tools": [ADD], "max_tokens": 55}),
    "one tool at a time": (parsing(CALLS), {"tools": [ADD], "parallel_tool_calls": False}),
    "no tool allowed": (parsing(CALLS), {"tools": [ADD], "tool_choice": "none"}),
    "reasoning and tools": (
        parsing(f"<think>x</think>{CALLS}"),
        {"tools": [ADD], "n": 2} | USAGE,
    ),
    # With a grammar, the output begins inside reasoning.
    "named tool": (
        parsing('x</think>{"a": 1}'),
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
    ),
    "required tools": (parsing(FORCED), {"tools": [ADD, SUB], "tool_choice": "required"}),
    "functions of the old way": (parsing(CALLS), {"functions": [ADD["function"]]}),
}


async def reply(name: str, *, stream: bool) -> httpx.Response:
    server, fields = CASES[name]
    if not stream:
        fields = {key: value for key, value in fields.items() if key != "stream_options"}
    return await ask(PATH, server, **HELLO, **fields, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CASES)
async def test_a_reply_is_as_it_has_always_been(name: str, stream: bool) -> None:
    response = await reply(name, stream=stream)
    check_golden(HERE, f"{name}, streamed" if stream else name, response)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"reasoning left out"}))
async def test_a_streams_pieces_add_up_to_the_answer_in_one_piece(name: str) -> None:
    streamed = events(await reply(name, stream=True))
    whole = (await reply(name, stream=False)).json()

    for choice in whole["choices"]:
        own = [
            piece
            for event in streamed
            for piece in event["choices"]
            if piece["index"] == choice["index"]
        ]
        deltas = [piece["delta"] for piece in own]
        message = choice["message"]
        for key in ("content", "reasoning", "reasoning_content"):
            assert "".join(d.get(key) or "" for d in deltas) == (message.get(key) or "")
        calls = [call for d in deltas for call in d.get("tool_calls", ())]
        for number, call in enumerate(message.get("tool_calls", ())):
            pieces = [c["function"] for c in calls if c["index"] == number]
            names = [piece["name"] for piece in pieces if "name" in piece]
            assert names == [call["function"]["name"]]
            joined = "".join(piece["arguments"] for piece in pieces)
            assert joined == call["function"]["arguments"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert all(piece["finish_reason"] is None for piece in own[:-1])
    if "stream_options" in CASES[name][1]:
        assert streamed[-1]["usage"] == whole["usage"]


async def test_prompt_logprobs_name_rank_and_text() -> None:
    response = await ask(PATH, **HELLO, max_tokens=1, prompt_logprobs=1)
    check_golden(HERE, "prompt logprobs", response)


async def test_a_stream_has_its_headers_and_one_id() -> None:
    response = await reply("text", stream=True)

    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "r1"
    assert len({(c["id"], c["created"], c["object"]) for c in events(response)}) == 1


@pytest.mark.parametrize("fields", [{}, {"n": 2}, USAGE])
async def test_after_a_late_error_nothing_follows_that_looks_like_an_end(
    fields: dict[str, Any],
) -> None:
    server = plain(error=EngineError("x"), fail_at=2)
    response = await ask(PATH, server, **HELLO, **fields, stream=True)

    check_golden(HERE, f"late error {', '.join(fields)}".strip(), response)
    *begun, error = events(response)
    assert error["error"]["code"] == "engine_failed"
    assert all(piece["finish_reason"] is None for e in begun for piece in e["choices"])
    assert not any(event.get("usage") for event in begun)


async def test_a_client_that_leaves_has_got_the_beginning_and_no_end() -> None:
    server = plain(gate=asyncio.Event())

    async with running(server, PATH, HELLO | {"stream": True}) as connection:
        connection.leave()
        await connection.task

    text = normal(b"".join(m.get("body", b"") for m in connection.sent).decode())
    begun = [event_of(frame) for frame in text.split("\n\n")[:-1]]
    for event in begun:
        event["data: "]["id"] = "chatcmpl-r1"  # the connection sends no id
    _, *whole = json.loads((HERE / "golden.json").read_text("utf-8"))["stop text, streamed"]
    assert 0 < len(begun) < len(whole)
    assert begun == whole[: len(begun)]
    assert server.client.running == set()
