"""Responses of the routes under /api, in Ollama's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.configs.errors import EngineError
from tests.deployments.fakes import (
    CharTokenizer,
    FakeEngine,
    FakeServer,
    make_client,
    make_config,
)
from tests.deployments.http.golden import check_golden
from tests.deployments.http.streams import ask

HELLO = [{"role": "user", "content": "Hi"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALLS = (
    'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
)
HERE = Path(__file__).parent


def make_server(text: str = "Paris.", **engine: Any) -> FakeServer:
    config = make_config(tool_parser="hermes", reasoning_parser="qwen3")
    tokenizer = CharTokenizer("enable_thinking")
    return FakeServer(FakeEngine(text=text, **engine), tokenizer=tokenizer, config=config)


async def post(path: str, server: FakeServer | None = None, **body: Any) -> httpx.Response:
    return await ask(path, server or make_server(), **body)


async def chat(server: FakeServer | None = None, **body: Any) -> Any:
    response = await post("/api/chat", server, **{"messages": HELLO, "stream": False} | body)
    assert response.status_code == 200, response.text
    return response.json()


THOUGHT = "<think>\n2+2\n</think>\n\n4"
CHAT, GENERATE = "/api/chat", "/api/generate"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # path, what the model says, fields of the body
    "chat": (CHAT, "ab", {"model": "tiny"}),
    "chat of a tagged name": (CHAT, "a", {"model": "tiny:latest"}),
    "generate": (GENERATE, "ab", {"prompt": "Hi", "system": "Be."}),
    "raw prompt": (GENERATE, "ab", {"prompt": "Hi", "raw": True}),
    "limit": (GENERATE, "abc", {"prompt": "Hi", "raw": True, "options": {"num_predict": 2}}),
    "calls": (CHAT, CALLS, {"tools": [ADD]}),
    "call that is cut off": (CHAT, CALLS, {"tools": [ADD], "options": {"num_predict": 51}}),
    "reasoning": (CHAT, THOUGHT, {}),
    "reasoning of generate": (GENERATE, THOUGHT, {"prompt": "Hi"}),
    "logprobs": (CHAT, "a", {"logprobs": True, "top_logprobs": 1}),
    **{
        f"{reason} of {path}": (path, "", {"model": "tiny", "messages": [], "keep_alive": keep})
        for path in (CHAT, GENERATE)
        for reason, keep in (("load", "5m"), ("unload", 0))
    },
}


@pytest.mark.parametrize("stream", [None, False])
@pytest.mark.parametrize("name", CASES)
async def test_a_reply_is_as_it_has_always_been(name: str, stream: bool | None) -> None:
    path, text, fields = CASES[name]
    body = {"messages": HELLO} | fields if path == CHAT else fields
    server = make_server(text)
    response = await post(path, server, **body, **({} if stream is None else {"stream": stream}))
    check_golden(HERE, name if stream is False else f"{name}, streamed", response)
    assert bool(server.client.requests) is bool(text)


async def test_generate_puts_a_prompt_into_a_chat_unless_it_is_raw() -> None:
    server = make_server()

    await post(GENERATE, server, prompt="Hi", system="Be.", stream=False)
    await post(GENERATE, server, prompt="Hi", raw=True, stream=False)

    (rendered,) = server.tokenizer.rendered
    assert [(m["role"], m["content"]) for m in rendered["messages"]] == [
        ("system", "Be."),
        ("user", "Hi"),
    ]
    assert server.client.requests[1].prompt_ids == [72, 105]


async def test_calls_and_their_results_reach_the_template() -> None:
    server = make_server()
    messages: list[Any] = [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "thinking": "Hm.",
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_name": "add"},
    ]

    await chat(server, messages=messages, tools=[ADD])

    _, assistant, tool = server.tokenizer.rendered[0]["messages"]
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert assistant["reasoning_content"] == "Hm."
    assert (tool["role"], tool["name"], tool["content"]) == ("tool", "add", "2")


@pytest.mark.parametrize("think", [True, False])
async def test_reasoning_is_switched_by_the_templates_variable(think: bool) -> None:
    server = make_server()
    await chat(server, think=think)
    assert server.tokenizer.rendered[0]["enable_thinking"] is think


async def test_an_error_after_the_first_token_is_the_last_line() -> None:
    server = make_server(error=EngineError("x"), fail_at=1)
    check_golden(HERE, "late error", await post(CHAT, server, messages=HELLO))


async def test_what_is_not_there_is_not_shown() -> None:
    other, none = await post("/api/show", model="other"), await post("/api/show")
    assert (other.status_code, none.status_code) == (404, 400)


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
async def test_a_model_that_writes_does_not_embed(path: str) -> None:
    response = await post(path, model="tiny", input="x", prompt="x")
    assert response.status_code == 400


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_client_that_asks_whether_anybody_is_there_is_told_so(method: str) -> None:
    """Ollama's command line sends this request first."""
    async with make_client() as client:
        response = await client.request(method, "/")
    assert response.status_code == 200
    assert response.text == ("remora is running" if method == "GET" else "")


async def test_the_model_is_listed() -> None:
    async with make_client(make_server()) as client:
        (listed,) = (await client.get("/api/tags")).json()["models"]
        (running,) = (await client.get("/api/ps")).json()["models"]
        found = (await client.get("/api/version")).json()

    assert listed["name"] == listed["model"] == running["name"] == "tiny"
    assert running["context_length"] == 1000
    assert set(found) == {"version"}


async def test_what_the_model_can_do_is_shown() -> None:
    shown = (await post("/api/show", model="tiny")).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["unknown.context_length"] == 1000
