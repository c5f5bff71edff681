"""Responses of the routes under /api, in Ollama's format."""

from __future__ import annotations

import json
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
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def make_server(text: str = "Paris.", **engine: Any) -> FakeServer:
    config = make_config(tool_parser="hermes", reasoning_parser="qwen3")
    tokenizer = CharTokenizer("enable_thinking")
    return FakeServer(FakeEngine(text=text, **engine), tokenizer=tokenizer, config=config)


async def post(path: str, server: FakeServer | None = None, **body: Any) -> httpx.Response:
    async with make_client(server or make_server()) as client:
        return await client.post(path, json=body)


async def chat(server: FakeServer | None = None, **body: Any) -> Any:
    response = await post("/api/chat", server, **{"messages": HELLO, "stream": False} | body)
    assert response.status_code == 200, response.text
    return response.json()


def lines(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def said(all_lines: list[Any]) -> list[Any]:
    """Return the content of the lines, without model, times and counts."""
    return [line.get("message", line.get("response")) for line in all_lines]


async def test_a_whole_answer_of_a_chat() -> None:
    answer = await chat(model="tiny")

    assert all(isinstance(answer.pop(name), int) for name in TIMES)
    assert answer.pop("created_at").endswith("Z")
    assert answer == {
        "model": "tiny",
        "message": {"role": "assistant", "content": "Paris."},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": 23,
        "eval_count": 6,
    }


async def test_a_chat_streams_unless_it_is_told_not_to() -> None:
    response = await post("/api/chat", make_server("ab"), messages=HELLO)

    found = lines(response)
    assert said(found) == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": ""},
    ]
    assert [line["done"] for line in found] == [False, False, True]
    assert (found[-1]["done_reason"], found[-1]["eval_count"]) == ("stop", 2)
    assert found[-1]["eval_duration"] > 0


async def test_generate_puts_a_prompt_into_a_chat() -> None:
    server = make_server("ab")

    found = lines(await post("/api/generate", server, prompt="Hi", system="Be."))

    assert said(found) == ["a", "b", ""]
    (rendered,) = server.tokenizer.rendered
    assert [(m["role"], m["content"]) for m in rendered["messages"]] == [
        ("system", "Be."),
        ("user", "Hi"),
    ]


async def test_a_raw_prompt_has_no_template_and_only_the_limit_that_is_given() -> None:
    server = make_server()
    fields: dict[str, Any] = {"prompt": "Hi", "raw": True, "stream": False}

    whole = (await post("/api/generate", server, **fields)).json()
    cut = (await post("/api/generate", **fields, options={"num_predict": 2})).json()

    (request,) = server.client.requests
    assert (request.prompt_ids, request.sampling.max_tokens) == ([72, 105], None)
    assert whole["response"] == "Paris."
    assert (cut["response"], cut["done_reason"]) == ("Pa", "length")


async def test_options_reach_the_engine() -> None:
    server = make_server()
    same = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7}
    same |= {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    renamed = {"num_predict": 5, "stop": ["x"], "repeat_penalty": 1.5, "num_ctx": 4096}

    await chat(server, options=same | renamed)

    sampling = server.client.requests[0].sampling
    assert {name: getattr(sampling, name) for name in same} == same
    assert (sampling.max_tokens, sampling.stop, sampling.repetition_penalty) == (5, ("x",), 1.5)


@pytest.mark.parametrize("num_predict", [-2, -1, 0])
async def test_no_limit_has_several_names(num_predict: int) -> None:
    server = make_server()
    await chat(server, options={"num_predict": num_predict})
    assert server.client.requests[0].sampling.max_tokens is None


async def test_a_whole_answer_with_calls() -> None:
    message = (await chat(make_server(CALLS), tools=[ADD]))["message"]

    functions = [call["function"] for call in message["tool_calls"]]
    assert message["content"].strip() == "Hm."
    assert functions == [
        {"index": 0, "name": "add", "arguments": {"a": 1}},
        {"index": 1, "name": "add", "arguments": {}},
    ]


async def test_a_streamed_call_is_told_once_and_whole() -> None:
    found = lines(await post("/api/chat", make_server(CALLS), messages=HELLO, tools=[ADD]))

    calls = [call for line in found for call in line["message"].get("tool_calls", ())]
    text = "".join(line["message"]["content"] for line in found)
    assert [call["function"]["arguments"] for call in calls] == [{"a": 1}, {}]
    assert len({call["id"] for call in calls}) == 2
    assert text.strip() == "Hm."
    assert found[-1]["done_reason"] == "stop"


async def test_a_call_that_was_cut_off_is_text() -> None:
    server = make_server(CALLS)

    streamed = lines(
        await post("/api/chat", server, messages=HELLO, tools=[ADD], options={"num_predict": 51})
    )
    whole = await chat(make_server(CALLS), tools=[ADD], options={"num_predict": 51})

    assert "tool_calls" not in whole["message"]
    assert all("tool_calls" not in line["message"] for line in streamed)
    assert "".join(m["content"] for m in said(streamed)) == whole["message"]["content"]
    assert whole["done_reason"] == "length"


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


async def test_reasoning_is_told_apart() -> None:
    text = "<think>\n2+2\n</think>\n\n4"

    whole = await chat(make_server(text))
    streamed = lines(await post("/api/chat", make_server(text), messages=HELLO))
    plain = (await post("/api/generate", make_server(text), prompt="Hi", stream=False)).json()

    assert (plain["thinking"], plain["response"]) == ("2+2", "4")
    assert (whole["message"]["thinking"], whole["message"]["content"]) == ("2+2", "4")
    reasoning = "".join(m.get("thinking", "") for m in said(streamed))
    assert (reasoning, "".join(m["content"] for m in said(streamed))) == ("2+2", "4")


@pytest.mark.parametrize("think", [True, False])
async def test_reasoning_is_switched_by_the_templates_variable(think: bool) -> None:
    server = make_server()
    await chat(server, think=think)
    assert server.tokenizer.rendered[0]["enable_thinking"] is think


@pytest.mark.parametrize(
    ("form", "kind"), [("json", "json_object"), ({"type": "object"}, "json_schema")]
)
async def test_a_format_reaches_the_engine(form: Any, kind: str) -> None:
    server = FakeServer()

    await chat(server, format=form)

    assert server.grammars.asked[0][0].kind == kind
    assert server.client.requests[0].grammar is not None


async def test_log_probabilities() -> None:
    answer = await chat(make_server("a"), logprobs=True, top_logprobs=1)
    streamed = lines(
        await post("/api/chat", make_server("a"), messages=HELLO, logprobs=True, top_logprobs=1)
    )

    entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert answer["logprobs"] == [entry | {"top_logprobs": [entry]}]
    assert streamed[0]["logprobs"] == answer["logprobs"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize(("keep_alive", "reason"), [("5m", "load"), (0, "unload")])
async def test_a_body_that_asks_nothing_is_answered_at_once(
    path: str, keep_alive: Any, reason: str
) -> None:
    server = make_server()

    whole = await post(path, server, model="tiny", stream=False, keep_alive=keep_alive)
    (line,) = lines(await post(path, server, model="tiny", keep_alive=keep_alive))

    assert (whole.json()["done"], whole.json()["done_reason"]) == (True, reason)
    assert line["done_reason"] == reason
    assert server.client.requests == []


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", None])
async def test_names_of_the_model(name: str | None) -> None:
    assert (await chat(model=name))["model"] == (name or "tiny")


async def test_what_is_not_there_is_not_shown() -> None:
    other, none = await post("/api/show", model="other"), await post("/api/show")
    assert (other.status_code, none.status_code) == (404, 400)


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
async def test_a_model_that_writes_does_not_embed(path: str) -> None:
    response = await post(path, model="tiny", input="x", prompt="x")
    assert response.status_code == 400


async def test_an_error_after_the_first_token_is_the_last_line() -> None:
    server = make_server(error=EngineError("x"), fail_at=1)
    assert set(lines(await post("/api/chat", server, messages=HELLO))[-1]) == {"error"}


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
    assert shown["model_info"]["remora.context_length"] == 1000
