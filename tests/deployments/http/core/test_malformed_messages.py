"""Whatever is sent to /v1/responses and /v1/messages: a 4xx that names the field, never a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remora.deployments.http.anthropic.bodies import CountTokensBody, MessagesBody
from remora.deployments.http.core.fields import Body
from remora.deployments.http.core.unsupported_fields import FIELDS
from remora.deployments.http.responses.bodies import ResponsesBody
from tests.deployments.fakes import (
    FakeServer,
    client_of,
    make_app,
    make_client,
    make_config,
    make_plan,
)
from tests.deployments.http.core.test_malformed import (
    BOUNDS,
    JSON_VALUES,
    NOWHERE_VALID,
    lenient_app,
)

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
HELLO = {"role": "user", "content": "Hi"}
ENDPOINTS: Mapping[str, tuple[type[Body], dict[str, Any]]] = {
    RESPONSES: (ResponsesBody, {"input": "Hi"}),
    MESSAGES: (MessagesBody, {"messages": [HELLO], "max_tokens": 5}),
    COUNT: (CountTokensBody, {"messages": [HELLO]}),
}
# Marks of Anthropic's service, which nobody looks into.
OPAQUE = {"cache_control", "user_profile_id", "workspace_id", "inference_geo", "diagnostics"}


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def assistant(*parts: Any) -> list[Any]:
    return [{"role": "assistant", "content": list(parts)}]


OWN_BOUNDS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    RESPONSES: {
        "input": (
            1,
            None,
            [],
            {},
            [1],
            [{"role": "user"}],
            [{"role": "nobody", "content": "x"}],
            [{"role": "user", "content": 1}],
            [{"type": "message", "content": "x"}],
            [{"type": "web_search_call", "id": "1"}],
            [{"type": "item_reference", "id": "msg_1"}],
            [{"type": ["message"], "role": "user", "content": "x"}],
            [{"type": "function_call", "call_id": "c", "name": "f"}],
            [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}],
            [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}],
            [{"type": "function_call", "call_id": "c", "name": "a b", "arguments": "{}"}],
            [{"type": "function_call_output", "call_id": "c"}],
            [{"type": "function_call_output", "call_id": 1, "output": "x"}],
            user({"type": "input_image", "image_url": "data:x"}),
            user({"type": "input_text"}),
            user({"type": ["input_text"], "text": "x"}),
            user(*[{"type": "input_text", "text": "x"}] * 513),
            [HELLO] * 2049,
        ),
        "max_output_tokens": (-1, 0, 1.0, True, "1", 2**31),
        "instructions": (1,),
        "previous_response_id": ("", "x" * 257, 1, "resp_unknown"),
        "store": (1, "true"),
        "background": (True, "x"),
        "truncation": ("auto", 1),
        "service_tier": ("flex", 1),
        "conversation": ("conv_1", {"id": "conv_1"}),
        "include": (["x"], "x", [1], ["reasoning.encrypted_content"] * 9),
        "reasoning": ({"effort": "much"}, {"effort": "high"}, {"summary": "x"}, "high"),
        "text": ({"format": "x"}, {"format": {"type": "x"}}, {"format": {"type": "json_schema"}}),
        "tools": (
            1,
            [1],
            [{}],
            [{"type": "web_search"}],
            [{"type": "function"}],
            [{"type": "function", "name": "a b"}],
            [{"type": "function", "name": "f", "parameters": []}],
            [{"type": "function", "name": "f", "parameters": {"type": "array"}}],
            [{"type": "function", "name": "f", "strict": 1}],
            [{"type": "function", "name": "f"}] * 2,
            [{"type": "function", "name": f"f{number}"} for number in range(129)],
        ),
        "tool_choice": (
            "any",
            "required",
            1,
            {"type": "function"},
            {"type": "function", "name": "f"},
            {"type": "web_search"},
            {"type": "allowed_tools"},
            {"type": "allowed_tools", "mode": "auto", "tools": []},
        ),
        "stop": ([""], ["x"] * 17, "", [1]),
        "top_logprobs": (-1, 21, True, 1.0),
        "stream_options": (True, {"include_obfuscation": True}),
    },
    MESSAGES: {
        "max_tokens": (0, -1, 1.5, True, "1", 2**31, None),
        "messages": (
            [],
            "Hi",
            [1],
            [{"role": "user"}],
            [{"role": "tool", "content": "x"}],
            [{"role": "user", "content": 1}],
            user({"type": "image", "source": {}}),
            user({"type": "text"}),
            user({"type": ["text"], "text": "x"}),
            user({"type": "tool_use", "id": "1", "name": "f", "input": {}}),
            user({"type": "tool_result"}),
            user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}),
            user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text"}]}),
            user({"type": "tool_result", "tool_use_id": "1", "content": 1}),
            user(*[{"type": "text", "text": "x"}] * 513),
            assistant({"type": "tool_result", "tool_use_id": "1"}),
            assistant({"type": "tool_use", "id": "1", "name": "f"}),
            assistant({"type": "tool_use", "id": "1", "name": "a b", "input": {}}),
            assistant({"type": "tool_use", "id": "1", "name": "f", "input": "{}"}),
            assistant({"type": "thinking"}),
            [HELLO] * 2049,
        ),
        "system": (1, [1], [{"type": "image"}], [{"type": "thinking", "thinking": "x"}]),
        "stop_sequences": ("x", [""], ["x"] * 17, ["x" * 257], [1]),
        "temperature": BOUNDS["temperature"],
        "top_k": (-1, 1.5, True, 2**31),
        "metadata": ({"user_id": 1}, "x"),
        "service_tier": ("priority", 1),
        "tools": (
            1,
            [1],
            [{}],
            [{"name": "f"}],
            [{"name": "a b", "input_schema": {}}],
            [{"name": "f", "input_schema": []}],
            [{"name": "f", "input_schema": {"type": "array"}}],
            [{"type": "bash_20250124", "name": "bash"}],
            [{"name": "f", "input_schema": {}}] * 2,
            [{"name": f"f{number}", "input_schema": {}} for number in range(129)],
        ),
        "tool_choice": (
            "auto",
            {"type": "required"},
            {"type": "tool"},
            {"type": "tool", "name": "f"},
            {"type": "any"},
            {"type": "auto", "disable_parallel_tool_use": 1},
        ),
        "thinking": (
            "enabled",
            {"type": "enabled"},
            {"type": "enabled", "budget_tokens": 0},
            {"type": "between_tools"},
            {"type": "enabled", "budget_tokens": 2000},
        ),
        "output_config": (
            {"effort": "much"},
            {"format": {"type": "text"}},
            {"format": {"type": "json_schema"}},
        ),
        "speed": ("fast",),
        "mcp_servers": ([{"url": "x"}],),
        "container": ("x", {}),
    },
}
# These need no engine, or more of one than the fake has.
NOT_COUNTED = {"thinking", "tool_choice"}


def cases() -> Iterator[Any]:
    for path, (model, valid) in ENDPOINTS.items():
        own = OWN_BOUNDS[MESSAGES if path == COUNT else path]
        for name in model.model_fields:
            if name in OPAQUE or (path == COUNT and name in NOT_COUNTED):
                continue
            bounds = own.get(name, BOUNDS.get(name, ()) if path == RESPONSES else ())
            for value in bounds + NOWHERE_VALID:
                sent = {"schema_": "schema"}.get(name, name)
                yield pytest.param(path, valid, sent, value, id=f"{path}-{name}-{value!r:.60}")


@cache
def strict_app() -> FastAPI:
    # Unknown fields would be let through otherwise, those of nested objects too.
    return make_app(FakeServer(config=make_config(unknown_fields="reject", tool_parser="hermes")))


async def post(path: str, body: Any) -> httpx.Response:
    async with client_of(strict_app()) as client:
        return await client.post(path, content=json.dumps(body))


@pytest.mark.parametrize(("path", "valid", "name", "value"), list(cases()))
async def test_a_bad_value_is_a_400_that_names_its_field(
    path: str, valid: dict[str, Any], name: str, value: Any
) -> None:
    response = await post(path, valid | {name: value})

    error = response.json()["error"]
    assert response.status_code in (400, 404), response.text
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert len(error["message"]) < 600
    told = error["param"] or "" if path == RESPONSES else error["message"]
    assert name in told, response.text


@pytest.mark.parametrize("path", list(ENDPOINTS))
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
async def test_no_body_at_all_makes_a_500(path: str, data: st.DataObject) -> None:
    model, valid = ENDPOINTS[path]
    names = st.sampled_from(sorted(model.model_fields)) | st.sampled_from(sorted(FIELDS))
    fields = data.draw(st.dictionaries(names | st.text(max_size=5), JSON_VALUES, max_size=4))
    async with client_of(lenient_app()) as client:
        response = await client.post(path, content=json.dumps(valid | fields))

    assert response.status_code < 500, response.text


PIECES = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            [
                *("message", "function_call", "function_call_output", "reasoning", "text"),
                *("input_text", "output_text", "thinking", "tool_use", "tool_result"),
            ]
        ),
        "role": st.sampled_from(["user", "assistant", "system", "developer"]),
        "text": JSON_VALUES,
        "content": JSON_VALUES,
        "output": JSON_VALUES,
        "summary": JSON_VALUES,
        "arguments": JSON_VALUES,
        "input": JSON_VALUES,
        "thinking": JSON_VALUES,
        "id": JSON_VALUES,
        "name": st.just("f") | JSON_VALUES,
        "call_id": st.just("c") | JSON_VALUES,
        "tool_use_id": st.just("c") | JSON_VALUES,
    },
)
CONVERSATIONS = st.lists(
    PIECES
    | st.builds(lambda role, content: {"role": role, "content": content},
                st.sampled_from(["user", "assistant", "system"]), st.lists(PIECES, max_size=3)),
    max_size=4,
)  # fmt: skip


@pytest.mark.parametrize("path", list(ENDPOINTS))
@settings(max_examples=150, deadline=None, derandomize=True)
@given(conversation=CONVERSATIONS)
async def test_no_conversation_makes_a_500(path: str, conversation: list[Any]) -> None:
    valid = ENDPOINTS[path][1]
    name = "input" if path == RESPONSES else "messages"
    async with client_of(lenient_app()) as client:
        response = await client.post(path, content=json.dumps(valid | {name: conversation}))
    assert response.status_code < 500, response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": [HELLO] * 2048}),
        (RESPONSES, {"input": user(*[{"type": "input_text", "text": "x"}] * 512)}),
        (MESSAGES, {"messages": [HELLO] * 2048, "max_tokens": 1}),
        (MESSAGES, {"messages": user(*[{"type": "text", "text": "x"}] * 512), "max_tokens": 1}),
        (
            MESSAGES,
            {
                "messages": [HELLO],
                "max_tokens": 1,
                "tools": [{"name": f"f{i}", "input_schema": {}} for i in range(128)],
            },
        ),
    ],
)
async def test_as_many_as_are_allowed_are_taken(path: str, body: Any) -> None:
    plan = make_plan(max_model_len=10**6, num_pages=10**5)
    server = FakeServer(plan=plan, config=make_config(tool_parser="hermes"))
    async with make_client(server) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text[:500]


@pytest.mark.parametrize("path", list(ENDPOINTS))
async def test_bodies_are_described(path: str) -> None:
    async with make_client() as client:
        description = (await client.get("/openapi.json")).json()
    content = description["paths"][path]["post"]["requestBody"]["content"]
    reference = content["application/json"]["schema"]["$ref"]
    properties = description["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    assert set(ENDPOINTS[path][1]) <= set(properties)
