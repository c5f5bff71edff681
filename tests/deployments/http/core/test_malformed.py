"""Whatever is sent in whatever field: a 4xx in OpenAI's shape that names the field, never a 500."""

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

from remora.deployments.http.core.fields import Body
from remora.deployments.http.core.unsupported_fields import FIELDS
from remora.deployments.http.generation.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from remora.deployments.http.sglang.bodies import GenerateBody, NativeSampling
from tests.deployments.fakes import (
    FakeServer,
    client_of,
    make_app,
    make_client,
    make_config,
    make_plan,
)

HELLO = [{"role": "user", "content": "Hi"}]
ENDPOINTS: Mapping[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": HELLO}),
    "/v1/completions": (CompletionBody, {"prompt": "a"}),
    "/generate": (GenerateBody, {"text": "a"}),
    "/tokenize": (TokenizeBody, {"messages": HELLO}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HUGE = 10**30
# No field takes any of these.
NOWHERE_VALID: tuple[Any, ...] = ([[[]]], {"a": {"b": [1]}}, [{"type": 5}], [True, None])
# What a field of each kind does not take, beyond those.
BOUNDS: Mapping[str, tuple[Any, ...]] = {
    "temperature": (-0.1, 101, HUGE, True, "1"),
    "top_p": (-0.1, 0, 1.1, True),
    "top_k": (-2, 1.5, 2**31, HUGE, True, "1"),
    "min_p": (-0.1, 1.1, True),
    "presence_penalty": (-2.1, 2.1, True),
    "frequency_penalty": (-2.1, 2.1, True),
    "repetition_penalty": (0, -1, 101, True),
    "logit_bias": ({"x": 1}, {"-1": 1}, {"999": 1}, {"1": 101}, {"1": True}, {"1": None}, [], 1),
    "stop": ("", [""], ["x"] * 17, "x" * 257, [1], 1),
    "stop_token_ids": ([-1], [257], [2**70], [1.0], [True], 1, [1] * 2000),
    "ignore_eos": (1, "true"),
    "no_stop_trim": (1, "true"),
    "skip_special_tokens": (1, "true"),
    "n": (0, -1, 17, 1.0, True, "1", HUGE),
    "max_tokens": (-1, 0, 1.0, True, "1", 2**31, HUGE),
    "max_completion_tokens": (-1, 0, 1.0, True, 2**31),
    "min_tokens": (-1, 1.0, True, 2**31),
    "seed": (2**64, -(2**63) - 1, 1.5, True, "1"),
    "include_stop_str_in_output": (1, "true"),
    "prompt_logprobs": (-1, 21, True, 1.0),
    "logprobs": (-1, 21, 2.5, "1"),
    "top_logprobs": (-1, 21, True, 1.0, 5),
    "best_of": (0, -1, 17, True),
    "stream": (1, "true"),
    "stream_options": (True, {"include_usage": 1}, {}, {"include_usage": True}),
    "return_token_ids": (1,),
    "return_tokens_as_token_ids": (1,),
    "priority": (2**31, 1.5, True, "1"),
    "cache_salt": ("", "x" * 257, 1),
    "rid": ("", "x" * 257, 1),
    "request_id": ("", "x" * 257, 1),
    "user": (1,),
    "metadata": ({"a": 1}, "x"),
    "model": (1, "x" * 2000, "tiny:adapter", "other", True),
    "messages": (
        [],
        "Hi",
        [1],
        [{"role": "user"}],
        [{"role": "nobody", "content": "x"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * 513}],
        [{"role": "user", "content": "x", "tool_calls": [CALL]}],
        [{"role": "user", "content": "x", "audio": {"id": "1"}}],
        [{"role": "tool", "tool_call_id": "1"}],
        [{"role": "tool", "content": "x", "tool_call_id": 1}],
        [{"role": "assistant"}],
        [{"role": "assistant", "tool_calls": []}],
        [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
        [{"role": "assistant", "tool_calls": [CALL] * 129}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "a b"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
        [{"role": "assistant", "function_call": {"name": "f", "arguments": 1}}],
        HELLO * 2049,
    ),
    "tools": (
        1,
        [1],
        [{}],
        [{"type": "web_search"}],
        [{"type": "function"}],
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "a" * 129}}],
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
        [{"type": "function", "function": {"name": "f", "strict": 1}}],
        [{"type": "function", "function": {"name": "f"}}] * 2,
        [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)],
    ),
    "tool_choice": (
        "any",
        "required",
        1,
        {"type": "function"},
        {"type": "function", "function": {"name": "f"}},
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    ),
    "parallel_tool_calls": (1, "true"),
    "functions": (1, [1], [{"name": "a b"}], [{"name": f"f{i}"} for i in range(129)]),
    "function_call": ("required", 1, {"name": 1}, {"name": "f"}),
    "response_format": (
        1,
        "json_object",
        {},
        {"type": "xml"},
        {"type": "text", "more": 1},
        {"type": "json_object", "more": 1},
        {"type": "json_object", "schema": 1},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}},
        {"type": "json_schema", "json_schema": {"schema": {}, "more": 1}},
    ),
    "structured_outputs": (
        1,
        {"json": {}, "regex": "a"},
        {"choice": []},
        {"regex": ""},
        {"more": 1},
        {"whitespace_pattern": " "},
    ),
    "guided_json": (1, []),
    "guided_regex": (1, ""),
    "guided_choice": (1, [], [1], [""], ["a"] * 1025),
    "guided_grammar": (1, ""),
    "guided_json_object": (1,),
    "guided_decoding_backend": (1, "outlines", "other"),
    "json_schema": (1, []),
    "regex": (1, ""),
    "ebnf": (1, ""),
    "grammar": (1, ""),
    "structural_tag": (1, []),
    "stop_regex": (1, [1], [""], ["a"] * 17, "a" * 257, "(", "a*", "^a"),
    "bad_words": ("a", [""], [1], ["a"] * 65, ["a" * 257]),
    "allowed_token_ids": ([], [-1], [257], [True], 1),
    "truncate_prompt_tokens": (0, -2, 1001, 1.5, True),
    "truncation_side": ("middle", "left", 1),
    "return_prompt_text": (1,),
    "service_tier": ("flex", 1),
    "store": (True, 1),
    "spaces_between_special_tokens": (1,),
    "reasoning_effort": ("huge", "high", 1),
    "include_reasoning": (1,),
    "separate_reasoning": (1,),
    "stream_reasoning": (1,),
    "thinking_token_budget": (-1, 1.5, True, 5),
    "documents": (1, [1], [{"text": "x"}], [{}] * 513),
    "suffix": (1, "x"),
    "add_generation_prompt": (1, "true"),
    "continue_final_message": (1, "true"),
    "chat_template_kwargs": ({"a": [1]}, {"a b": 1}, {"messages": "x"}, [], "x"),
    "prompt": ("", [], [[]], ["a", 1], [1, "a"], [-1], [257], [1.5], [True], ["a"] * 257, 1),
    "echo": (1, "true"),
    "text": ("", [], [1], ["a", 1], 1, True),
    "input_ids": ([], [[]], [-1], [[257]], ["a"], "a", [1.5]),
    "sampling_params": ("x", 1, [1], [], [{}, {}]),
    "return_logprob": (1,),
    "logprob_start_len": (-2, 1.5, True),
    "top_logprobs_num": (-1, 21, True),
    "max_new_tokens": (-1, 1.5, True, 2**31),
    "min_new_tokens": (-1, 1.5, True),
    "sampling_seed": (2**64, 1.5, True),
    "tokens": ([-1], [257], "x", 1, [[1], 2], [1.5], [True]),
}
# A field's fault may be found to be another's.
ELSEWHERE: Mapping[str, set[str]] = {"text": {"input_ids"}, "input_ids": {"text"}}


# Only the compiler can tell what is wrong with an object in these.
SCHEMAS = ("guided_json", "json_schema", "structural_tag")


def bad_values(name: str) -> tuple[Any, ...]:
    nowhere = tuple(v for v in NOWHERE_VALID if not (name in SCHEMAS and isinstance(v, dict)))
    return BOUNDS.get(name, ()) + nowhere


def fields() -> Iterator[Any]:
    """Yield each path's fields, with a valid body for the others."""
    for path, (model, valid) in ENDPOINTS.items():
        for name in model.model_fields:
            yield pytest.param(path, valid, name, id=f"{path}-{name}")
    for name in NativeSampling.model_fields:
        yield pytest.param(
            "/generate", {"text": "a"}, f"sampling_params.{name}", id=f"native-{name}"
        )


@cache
def strict_app() -> FastAPI:
    # Unknown fields would be let through otherwise, those of nested objects too.
    return make_app(FakeServer(config=make_config(unknown_fields="reject")))


async def post(path: str, body: Any) -> httpx.Response:
    async with client_of(strict_app()) as client:
        return await client.post(path, content=json.dumps(body))


@pytest.mark.parametrize(("path", "valid", "name"), list(fields()))
async def test_a_bad_value_is_a_400_that_names_its_field(
    path: str, valid: dict[str, Any], name: str
) -> None:
    head, _, tail = name.partition(".")
    allowed = {name} | ELSEWHERE.get(name, set())

    for value in bad_values(tail or head):
        response = await post(path, valid | {head: {tail: value} if tail else value})

        told = f"{value!r:.80}: {response.text}"
        error = response.json()["error"]
        assert response.status_code in (400, 404), told
        assert error["type"] in ("invalid_request_error", "not_found_error"), told
        assert len(error["message"]) < 600, told
        assert any((error["param"] or "").startswith(field) for field in allowed), told


UNSUPPORTED = [
    (path, name)
    for path in ("/v1/chat/completions", "/v1/completions", "/generate")
    for name in sorted(FIELDS.keys() - ENDPOINTS[path][0].model_fields.keys())
]


@pytest.mark.parametrize(("path", "name"), UNSUPPORTED)
async def test_an_unsupported_field_is_refused_by_name(path: str, name: str) -> None:
    response = await post(path, ENDPOINTS[path][1] | {name: {"x": 1}})

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert error["code"] == "unsupported"


@pytest.mark.parametrize(("path", "name"), UNSUPPORTED)
async def test_an_unsupported_field_that_asks_for_nothing_is_let_through(
    path: str, name: str
) -> None:
    for harmless in (None, *FIELDS[name][1]):
        response = await post(path, ENDPOINTS[path][1] | {name: harmless})
        assert response.status_code == 200
        assert "x-remora-ignored-fields" not in response.headers


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"   ",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'"text"',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 65 + b"}",
        b'{"prompt": "a", "unknown": ' + b"9" * 65 + b"}",
        b'{"prompt": "a", "unknown": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b'{"prompt": "a"} trailing',
        b"\xef\xbb\xbf{}",
        b"\x00",
    ],
)
@pytest.mark.parametrize("path", list(ENDPOINTS))
async def test_broken_json_is_a_400(path: str, raw: bytes) -> None:
    async with make_client() as client:
        response = await client.post(path, content=raw)

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_many_digits_within_a_text_are_a_text() -> None:
    assert (await post("/v1/completions", {"prompt": 'a\\"' + "9" * 100})).status_code == 200


async def test_nesting_of_64_levels_is_allowed() -> None:
    body = b'{"prompt": "a", "unknown": ' + b"[" * 63 + b"]" * 63 + b"}"
    async with make_client() as client:
        response = await client.post("/v1/completions", content=body)
    assert response.headers["x-remora-ignored-fields"] == "unknown"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@cache
def lenient_app() -> FastAPI:
    return make_app(FakeServer(config=make_config(max_body_bytes=100_000)))


@pytest.mark.parametrize("path", list(ENDPOINTS))
@settings(
    max_examples=60,
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
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_digits_within_a_text_are_no_number() -> None:
    text = "1" * 70 + "a" * 200_000
    async with make_client(FakeServer(plan=make_plan(max_model_len=10**6, num_pages=10**5))) as c:
        response = await c.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
    assert response.status_code == 200


async def test_metadata_is_refused_at_its_first_fault() -> None:
    body = {"prompt": "a", "metadata": {str(number): 1 for number in range(100_000)}}
    async with make_client() as client:
        response = await client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "metadata")


@pytest.mark.parametrize(
    ("body", "param"), [({"prompt": "a", "n": 9}, "n"), ({"prompt": ["a"] * 9}, "prompt")]
)
async def test_more_sequences_than_the_server_ever_takes_are_not_to_be_retried(
    body: dict[str, Any], param: str
) -> None:
    server = FakeServer(plan=make_plan(max_running_requests=4, max_queued_requests=4))
    async with make_client(server) as client:
        response = await client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert response.headers["x-should-retry"] == "false"
