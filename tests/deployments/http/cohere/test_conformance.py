"""Cohere's /v2/chat: its conformance table, and tool calls as whole answers and as events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.deployments.fakes import CharTokenizer, FakeEngine, FakeServer, make_config
from tests.deployments.http.conformance import ABSENT, Row, check_row, check_shape, content_of
from tests.deployments.http.streams import ask, prompt_of

SOURCE = "Cohere, API reference of v2/chat"
PATH = "/v2/chat"
USER = {"role": "user", "content": "Hi"}
USAGE = {"tokens": {"input_tokens": int, "output_tokens": 2}, "billed_units": {"input_tokens": int}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def chat(status: int, answer: Any, /, **fields: Any) -> Row:
    return Row(SOURCE, PATH, {"model": "tiny", "messages": [USER]} | fields, status, answer)


def refused(param: str, /, **fields: Any) -> Row:
    return chat(400, {"message": str, "error": {"param": param}}, **fields)


TABLE: dict[str, Row] = {
    "an answer": chat(
        200,
        {
            "id": str,
            "message": {
                "role": "assistant",
                "content": [{"type": "text", "text": "ab"}],
                "tool_calls": ABSENT,
            },
            "finish_reason": "COMPLETE",
            "usage": USAGE,
            "choices": ABSENT,
        },
    ),
    "a limit": chat(200, {"finish_reason": "MAX_TOKENS"}, max_tokens=1),
    "sampling": chat(
        200,
        {"finish_reason": "COMPLETE"},
        k=3,
        p=0.5,
        temperature=0.3,
        seed=1,
        safety_mode="OFF",
        citation_options={"mode": "OFF"},
        priority=3,
    ),
    "log-probabilities": chat(
        200,
        {"logprobs": [{"text": "a", "token_ids": [97], "logprobs": [-0.5]}, Any]},
        logprobs=True,
    ),
    "a schema": chat(
        200,
        {"message": {"content": [{"text": "ab"}]}},
        response_format={"type": "json_object", "schema": {"type": "object"}},
    ),
    "a stream": chat(
        200,
        [
            {"type": "message-start", "id": str, "delta": {"message": {"role": "assistant"}}},
            {
                "type": "content-start",
                "index": 0,
                "delta": {"message": {"content": {"type": "text", "text": ""}}},
            },
            {"type": "content-delta", "delta": {"message": {"content": {"text": "a"}}}},
            {"type": "content-delta", "delta": {"message": {"content": {"text": "b"}}}},
            {"type": "content-end", "index": 0},
            {"type": "message-end", "delta": {"finish_reason": "COMPLETE", "usage": USAGE}},
        ],
        stream=True,
    ),
    "no messages": refused("messages", messages=[]),
    "an image": refused(
        "messages[0].content",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    ),
    "citations": refused("citation_options", citation_options={"mode": "ACCURATE"}),
    "safety": refused("safety_mode", safety_mode="STRICT"),
    "a stream of log-probabilities": refused("logprobs", logprobs=True, stream=True),
    "a tool choice without tools": refused("tool_choice", tool_choice="REQUIRED"),
    "k out of range": refused("k", k=501),
    "p out of range": refused("p", p=2.0),
    "an unknown model": chat(404, {"message": str}, model="other"),
}


@pytest.mark.parametrize("name", TABLE)
async def test_conformance(name: str) -> None:
    await check_row(TABLE[name], FakeServer(client=FakeEngine(text="ab")))


def tool_server(text: str = f"I look.{CALL}") -> FakeServer:
    return FakeServer(client=FakeEngine(text=text), config=make_config(tool_parser="hermes"))


async def test_calls_whole_and_as_events() -> None:
    body: dict[str, Any] = {"messages": [USER], "tools": [WEATHER], "max_tokens": 200}
    whole = (await ask(PATH, tool_server(), **body)).json()
    events = content_of(await ask(PATH, tool_server(), **body, stream=True))

    assert whole["finish_reason"] == "TOOL_CALL"
    assert whole["message"]["content"] == [{"type": "text", "text": "I look."}]
    (call,) = whole["message"]["tool_calls"]
    check_shape(call, {"id": str, "type": "function", "function": {"name": "weather"}})
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}

    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message-start", "content-start"]
    assert kinds[-2:] == ["tool-call-end", "message-end"]
    begun = events[kinds.index("tool-call-start")]
    assert kinds[kinds.index("tool-call-start") - 1] == "content-end"
    assert begun["delta"]["message"]["tool_calls"]["function"] == {
        "name": "weather",
        "arguments": "",
    }
    pieces = [
        event["delta"]["message"]["tool_calls"]["function"]["arguments"]
        for event in events
        if event["type"] == "tool-call-delta"
    ]
    assert json.loads("".join(pieces)) == {"city": "Rome"}
    assert events[-1]["delta"]["finish_reason"] == "TOOL_CALL"


async def test_earlier_calls_their_results_and_documents_reach_the_template() -> None:
    server = tool_server("Sunny.")
    server.tokenizer = CharTokenizer("documents")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    document = {"id": "d1", "data": {"text": "It is warm."}}
    answer = await ask(
        PATH,
        server,
        messages=[
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "tool_plan": "I look.", "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [{"type": "document", "document": {"data": {"sky": "clear"}}}],
            },
        ],
        tools=[WEATHER],
        documents=["It is May.", document],
        stop_sequences=["!"],
    )
    assert answer.status_code == 200, answer.text
    rendered = server.tokenizer.rendered[0]
    assert [message["role"] for message in rendered["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert rendered["messages"][2]["content"] == "I look."
    assert rendered["messages"][3]["content"] == "sky: clear"
    assert rendered["documents"] == [{"text": "It is May."}, {"text": "It is warm.", "id": "d1"}]
    assert "weather" in prompt_of(server)
    assert tuple(server.client.requests[0].sampling.stop) == ("!",)
