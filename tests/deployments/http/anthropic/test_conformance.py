"""Anthropic's API as its own clients expect it: each request, its status, its events and fields.

Sources: Anthropic's reference of the API, and the types of its Python client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import groupby
from typing import Any, NamedTuple

import httpx
import pytest

from remora.deployments.http.anthropic.bodies import CountTokensBody, MessagesBody
from remora.engine.types import Request
from tests.deployments.fakes import CharTokenizer, FakeServer, make_client, make_config
from tests.deployments.http.anthropic.test_messages import ADD, HELLO, messages_of, post
from tests.deployments.http.responses.test_response import make_parsing_server

MESSAGES, COUNT, MODELS = "/v1/messages", "/v1/messages/count_tokens", "/v1/models"
ONCE: dict[str, Any] = {"messages": HELLO, "max_tokens": 5}
VERSION = {"anthropic-version": "2023-06-01", "x-request-id": "r1"}

# -- requests, and what answers them ------------------------------------------------------------

Row = tuple[str, str, Any, int, Any]
ROWS: tuple[Row, ...] = (
    # method, path, body, status, keys of the answer or the type of its error
    ("POST", MESSAGES, ONCE, 200, {"id", "type", "role", "model", "content", "usage"}),
    ("POST", MESSAGES, ONCE, 200, {"stop_reason", "stop_sequence"}),
    ("POST", MESSAGES, {"messages": HELLO}, 400, "invalid_request_error"),
    ("POST", MESSAGES, ONCE | {"model": "x"}, 404, "not_found_error"),
    ("GET", MESSAGES, None, 405, "invalid_request_error"),
    ("POST", COUNT, {"messages": HELLO}, 200, {"input_tokens"}),
    ("POST", COUNT, {"messages": []}, 400, "invalid_request_error"),
    ("POST", COUNT, {"messages": HELLO, "model": "x"}, 404, "not_found_error"),
    ("POST", f"{MESSAGES}/batches", {"requests": []}, 404, "not_found_error"),
    ("GET", MODELS, None, 200, {"data", "has_more", "first_id", "last_id"}),
    ("GET", f"{MODELS}?limit=0", None, 400, "invalid_request_error"),
    ("GET", f"{MODELS}?after_id=x", None, 400, "invalid_request_error"),
    ("GET", f"{MODELS}/tiny", None, 200, {"type", "id", "display_name", "created_at"}),
    ("GET", f"{MODELS}/x", None, 404, "not_found_error"),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]} {row[3]}")
async def test_a_request_has_its_status_and_shape(row: Row) -> None:
    method, path, body, status, shape = row
    async with make_client() as client:
        response = await client.request(method, path, json=body, headers=VERSION)

    found = response.json()
    assert response.status_code == status, response.text
    if status == 200:
        assert shape <= found.keys()
    else:
        assert found.keys() == {"type", "error", "request_id"}
        assert (found["type"], found["error"]["type"]) == ("error", shape)
        assert found["request_id"] == "r1"


@pytest.mark.parametrize("path", [MESSAGES, COUNT, MODELS])
async def test_every_answer_has_its_id(path: str) -> None:
    async with make_client() as client:
        method = "GET" if path == MODELS else "POST"
        body = None if path == MODELS else ONCE | {"stream": path == MESSAGES}
        response = await client.request(method, path, json=body, headers=VERSION)
        plain = await client.get(MODELS)

    assert response.status_code == 200
    assert response.headers["request-id"] == "r1"
    assert "request-id" not in plain.headers


async def test_a_stream_has_its_events_in_order() -> None:
    server = make_parsing_server("<think>Hm.</think>Hi")
    response = await post(server, stream=True, thinking={"type": "adaptive", "display": "omitted"})
    found = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
    kinds = [kind for kind, _ in groupby(found)]

    block = ["content_block_start", "content_block_stop"]
    assert kinds[:3] == ["message_start", *block]  # reasoning without its text
    assert kinds[3:] == [
        *("content_block_start", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert "Hm." not in response.text
    whole = (await post(server, thinking={"type": "adaptive", "display": "omitted"})).json()
    assert whole["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert whole["content"][1]["text"] == "Hi"


# -- models -------------------------------------------------------------------------------------


async def test_models_have_the_shape_of_the_clients_api() -> None:
    async with make_client() as client:
        ours = (await client.get(MODELS, headers=VERSION)).json()
        one = (await client.get(f"{MODELS}/tiny", headers=VERSION)).json()
        openais = (await client.get(MODELS)).json()
        nothing = (await client.get(f"{MODELS}?before_id=tiny", headers=VERSION)).json()

    assert ours == {"data": [one], "has_more": False, "first_id": "tiny", "last_id": "tiny"}
    assert (one["type"], one["id"], one["display_name"]) == ("model", "tiny", "tiny")
    assert datetime.fromisoformat(one["created_at"]).tzinfo is not None
    assert one["max_input_tokens"] == one["max_tokens"] == 1000
    assert openais["object"] == "list"
    assert nothing == {"data": [], "has_more": False, "first_id": None, "last_id": None}


# -- fields -------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """A request as the engine saw it, and its answer."""

    server: FakeServer
    request: Request
    answer: httpx.Response


Effect = Callable[[Sent], bool]


def sampling(name: str, value: Any) -> Effect:
    return lambda sent: bool(getattr(sent.request.sampling, name) == value)


def prompted(text: str) -> Effect:
    return lambda sent: text in "".join(map(chr, sent.request.prompt_ids))


FORMAT = {"type": "json_schema", "schema": ADD["input_schema"]}
EPHEMERAL = {"type": "ephemeral"}
# Field -> a value, and its effect: None = a hint that changes nothing, a status = it is refused.
FIELDS: Mapping[str, tuple[Any, Effect | int | None]] = {
    "cache_control": (EPHEMERAL, None),
    "cache_salt": ("s", lambda sent: sent.request.cache_salt == "s"),
    "chat_template_kwargs": ({"x": 1}, lambda sent: sent.server.tokenizer.rendered[0]["x"] == 1),
    "container": ("container_1", 400),
    "context_management": (
        {"edits": []},
        lambda sent: sent.answer.json()["context_management"] == {"applied_edits": []},
    ),
    "diagnostics": ({"previous_message_id": "msg_1"}, None),
    "fallbacks": ([{"model": "x"}], 400),
    "inference_geo": ("us", None),
    "max_drafts": (0, sampling("max_drafts", 0)),
    "max_tokens": (2, sampling("max_tokens", 2)),
    "mcp_servers": ([{"type": "url", "url": "http://x", "name": "x"}], 400),
    "messages": ([{"role": "user", "content": "Yes?"}], prompted("<|user|>Yes?")),
    "metadata": ({"user_id": "u"}, None),
    "model": ("x", 404),
    "output_config": ({"format": FORMAT}, lambda sent: len(sent.server.grammars.asked) == 1),
    "output_format": (FORMAT, lambda sent: len(sent.server.grammars.asked) == 1),
    "priority": (3, lambda sent: sent.request.priority == 3),
    "service_tier": ("standard_only", None),
    "speed": ("fast", 400),
    "stop_sequences": (["x"], sampling("stop", ("x",))),
    "stream": (True, lambda sent: "event: message_stop" in sent.answer.text),
    "system": ("Be brief.", prompted("<|system|>Be brief.")),
    "temperature": (0.5, sampling("temperature", 0.5)),
    "thinking": (
        {"type": "disabled"},
        lambda sent: sent.server.tokenizer.rendered[0]["enable_thinking"] is False,
    ),
    "tool_choice": ({"type": "any"}, lambda sent: bool(sent.server.grammars.asked)),
    "tools": ([ADD], lambda sent: bool(sent.server.tokenizer.rendered[0]["tools"])),
    "top_k": (5, sampling("top_k", 5)),
    "top_p": (0.5, sampling("top_p", 0.5)),
    "user_profile_id": ("u", None),
    "workspace_id": ("w", None),
}


@pytest.mark.parametrize("name", FIELDS)
async def test_a_field_has_its_effect_or_is_refused_by_name(name: str) -> None:
    value, effect = FIELDS[name]
    others: dict[str, Any] = {"tools": [ADD]} if name == "tool_choice" else {}
    server, plain = make_parsing_server("Paris."), make_parsing_server("Paris.")
    server.tokenizer, plain.tokenizer = (CharTokenizer("enable_thinking") for _ in range(2))
    # Its replies do not begin within reasoning, so reasoning can be switched off.
    server.config = plain.config = make_config(tool_parser="hermes", reasoning_parser="qwen3")
    response = await post(server, **others, **{name: value})

    if isinstance(effect, int):
        assert response.status_code == effect
        assert name in response.json()["error"]["message"]
        return
    assert response.status_code == 200, response.text
    assert "x-remora-ignored-fields" not in response.headers
    (request,) = server.client.requests
    if effect is not None:
        assert effect(Sent(server, request, response))
        return
    await post(plain)
    (other,) = plain.client.requests
    assert (request.prompt_ids, request.sampling) == (other.prompt_ids, other.sampling)


def test_every_field_of_the_body_is_in_the_table() -> None:
    ours = MessagesBody.model_fields.keys() | CountTokensBody.model_fields.keys()
    assert sorted(FIELDS.keys() ^ ours) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"container": None, "mcp_servers": [], "inference_geo": None},
        {"output_config": {"effort": "xhigh", "format": None}},
        {"system": [{"type": "text", "text": "x", "cache_control": EPHEMERAL | {"ttl": "1h"}}]},
        {"tools": [ADD | {"cache_control": EPHEMERAL}]},
        {
            "messages": [
                {"role": "user", "content": [
                    {"type": "text", "text": "x", "cache_control": EPHEMERAL, "citations": None}]},
                {"role": "assistant", "content": [
                    {"type": "text", "text": "x", "citations": [{"type": "char_location"}]},
                    {"type": "tool_use", "id": "c", "name": "add", "input": {},
                     "cache_control": EPHEMERAL}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c", "cache_control": EPHEMERAL,
                     "content": [{"type": "text", "text": "x", "cache_control": EPHEMERAL}]}]},
            ]
        },
    ],
    ids=lambda fields: ",".join(fields),
)  # fmt: skip
async def test_what_current_clients_send_along_is_taken_everywhere(fields: dict[str, Any]) -> None:
    response = await post(make_parsing_server("x"), **fields)
    assert response.status_code == 200, response.text
    assert "x-remora-ignored-fields" not in response.headers


# -- documents and search results ---------------------------------------------------------------

NOTES = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "A is 1."},
    "title": "Notes",
    "context": "From May",
    "citations": {"enabled": False},
    "cache_control": EPHEMERAL,
}
PIECES = {"type": "document", "source": {"type": "content", "content": [
    {"type": "text", "text": "B is 2."}, {"type": "text", "text": "C is 3."}]}}  # fmt: skip
FOUND = {
    "type": "search_result",
    "source": "http://x",
    "title": "X",
    "content": [{"type": "text", "text": "D is 4."}],
}
READ = {
    "notes": "[Document]\nTitle: Notes\nContext: From May\n\nA is 1.",
    "pieces": "[Document]\n\nB is 2.\nC is 3.",
    "found": "[Search result]\nTitle: X\nSource: http://x\n\nD is 4.",
}


async def test_documents_and_search_results_are_read_as_text() -> None:
    question = {"type": "text", "text": "What?"}
    use = {"type": "tool_use", "id": "c", "name": "find", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [FOUND, NOTES]}
    messages = await messages_of(
        messages=[
            {"role": "user", "content": [NOTES, PIECES, FOUND, question]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
    )

    read = [READ["notes"], READ["pieces"], READ["found"], "What?"]
    assert messages[0]["content"] == "\n".join(read)
    assert messages[2]["content"] == "\n".join([READ["found"], READ["notes"]])


# -- edits of the conversation ------------------------------------------------------------------


def turns(num_uses: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = list(HELLO)
    for number in range(num_uses):
        thinking = {"type": "thinking", "thinking": f"t{number}", "signature": ""}
        name = "keep" if number == 0 else "add"
        use = {"type": "tool_use", "id": f"c{number}", "name": name, "input": {"a": number}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": "r" * 100}
        found += [
            {"role": "assistant", "content": [thinking, use]},
            {"role": "user", "content": [result]},
        ]
    return found


TOOL_USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"


def uses(value: int) -> dict[str, Any]:
    return {"type": "tool_uses", "value": value}


# Edit -> numbers of the results, inputs and thoughts that are left of 5.
EDITS: tuple[tuple[dict[str, Any], list[int], list[int], list[int]], ...] = (
    ({"type": TOOL_USES}, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ({"type": TOOL_USES, "trigger": uses(4)}, [2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ({"type": TOOL_USES, "trigger": uses(5)}, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    (
        {
            "type": TOOL_USES,
            "trigger": {"type": "input_tokens", "value": 10},
            "keep": uses(1),
            "clear_tool_inputs": True,
        },
        [4],
        [4],
        [0, 1, 2, 3, 4],
    ),
    (
        {"type": TOOL_USES, "trigger": uses(0), "keep": uses(2), "exclude_tools": ["keep"]},
        [0, 3, 4],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ),
    (
        {
            "type": TOOL_USES,
            "trigger": uses(0),
            "clear_at_least": {"type": "input_tokens", "value": 10_000},
        },
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ),
    ({"type": THINKING}, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [4]),
    ({"type": THINKING, "keep": "all"}, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    (
        {"type": THINKING, "keep": {"type": "thinking_turns", "value": 2}},
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
        [3, 4],
    ),
)


@pytest.mark.parametrize("row", EDITS, ids=lambda row: str(row[0]))
async def test_an_edit_leaves_out_what_it_names(
    row: tuple[dict[str, Any], list[int], list[int], list[int]],
) -> None:
    edit, results, inputs, thoughts = row
    server = make_parsing_server("x")
    body: dict[str, Any] = {"messages": turns(5), "context_management": {"edits": [edit]}}
    answer = await post(server, max_tokens=5, **body)
    sent = server.tokenizer.rendered[-1]["messages"]
    counted = (await post(server, "/count_tokens", **body)).json()
    assert answer.status_code == 200, answer.text

    said = [message for message in sent if message["role"] == "assistant"]
    read = [message["content"] for message in sent if message["role"] == "tool"]
    calls = [message["tool_calls"][0]["function"]["arguments"] for message in said]
    assert [n for n, text in enumerate(read) if text == "r" * 100] == results
    assert [n for n, arguments in enumerate(calls) if arguments == {"a": n}] == inputs
    assert [n for n, m in enumerate(said) if m.get("reasoning_content")] == thoughts
    num_cleared = 5 - len(results) or 5 - len(thoughts)
    applied = answer.json()["context_management"]["applied_edits"]
    assert len(applied) == bool(num_cleared)
    for one in applied:
        name = "cleared_tool_uses" if edit["type"] == TOOL_USES else "cleared_thinking_turns"
        assert (one["type"], one[name]) == (edit["type"], num_cleared)
        original = counted["context_management"]["original_input_tokens"]
        assert original - counted["input_tokens"] == one["cleared_input_tokens"]


async def test_a_stream_tells_its_edits_at_the_end() -> None:
    edits = {"edits": [{"type": THINKING}]}
    response = await post(make_parsing_server("x"), stream=True, context_management=edits)
    (delta,) = [line for line in response.text.splitlines() if '"message_delta"' in line]
    assert '"context_management":{"applied_edits":[]}' in delta
