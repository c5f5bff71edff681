"""Bad values of every field: a 4xx in the API's format that names the field, never a 500."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from remora.deployments.http.anthropic.bodies import CountTokensBody, MessagesBody
from remora.deployments.http.core.fields import Body
from remora.deployments.http.core.unsupported_fields import FIELDS
from remora.deployments.http.generation.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from remora.deployments.http.lightllm.bodies import LightBody, LightParameters, TokensBody
from remora.deployments.http.llamacpp.bodies import (
    ApplyTemplateBody,
    LlamaCompletionBody,
    LlamaTokenizeBody,
)
from remora.deployments.http.ollama.bodies import (
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
    PullBody,
    ShowBody,
)
from remora.deployments.http.responses.bodies import ResponsesBody
from remora.deployments.http.rtp_llm.bodies import RtpBody, TokenizerEncodeBody
from remora.deployments.http.rtp_llm.generate_config import RtpConfig
from remora.deployments.http.sglang.bodies import GenerateBody, NativeSampling
from remora.deployments.http.sglang.parse_routes import ParseCallsBody, SeparateBody
from remora.deployments.http.tgi.bodies import TgiBody, TgiGrammar, TgiParameters
from tests.deployments.fakes import (
    FakeServer,
    client_of,
    make_client,
    make_config,
    make_plan,
    share_app,
)
from tests.deployments.http.core import bad_values as bad
from tests.deployments.http.core.bad_values import ADD, HELLO, NOWHERE_VALID, BadValues


class Place(NamedTuple):
    """The fields of a body model: sent to `path`, under the key `within`, with the valid fields.

    values:   bad values of fields with a meaning specific to this model
    common:   bad values of the other fields
    opaque:   fields that are not checked, or checked by the engine only
    objects:  fields that accept any object
    naming:   part of the error that names the field; None: the dialect need not name it
    """

    path: str
    model: type[Body]
    valid: Mapping[str, Any]
    within: str = ""
    dialect: str = "auto"
    values: BadValues = MappingProxyType({})
    common: BadValues = bad.OPENAI
    opaque: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset({"guided_json", "json_schema", "structural_tag"})
    naming: str | None = "param"


def dialect_place(
    path: str,
    model: type[Body],
    valid: dict[str, Any],
    *taken: str,
    within: str = "",
    dialect: str = "auto",
) -> Place:
    """Return a place of TGI, LightLLM or Ollama; `taken` fields accept values invalid elsewhere."""
    return Place(
        *(path, model, valid, within, dialect),
        values={**bad.DIALECTS, **dict.fromkeys(taken, ())},
        opaque=frozenset({"mirostat_tau", "mirostat_eta"}),
        objects=frozenset({"value", "guided_json", "format", *taken}),
        naming=None,
    )


CHAT = {"messages": [HELLO], "stream": False}
PROMPT = {"prompt": "a", "stream": False}
INPUTS = {"inputs": "a"}
PARSED = {"text": "a", "tools": [ADD], "tool_call_parser": "hermes"}
# Fields of Anthropic's service, which are ignored.
OPAQUE = frozenset(
    {"cache_control", "user_profile_id", "workspace_id", "inference_geo", "diagnostics"}
)
NOT_COUNTED = frozenset({"thinking", "tool_choice"})
LOGPROBS = ("logprobs", "top_logprobs", "truncate")
RTP_OBJECTS = frozenset({"guided_json", "json_schema", "structural_tag", "master_info"})
PLACES = {
    "openai-chat": Place("/v1/chat/completions", ChatBody, {"messages": [HELLO]}),
    "completions": Place("/v1/completions", CompletionBody, {"prompt": "a"}),
    "sglang": Place("/generate", GenerateBody, {"text": "a"}),
    "sglang-sampling": Place("/generate", NativeSampling, {"text": "a"}, "sampling_params"),
    "tokenize": Place("/tokenize", TokenizeBody, {"messages": [HELLO]}),
    "detokenize": Place("/detokenize", DetokenizeBody, {"tokens": [1]}),
    "responses": Place(
        "/v1/responses", ResponsesBody, {"input": "Hi"}, values=bad.RESPONSES, opaque=OPAQUE
    ),
    "messages": Place(
        "/v1/messages",
        MessagesBody,
        {"messages": [HELLO], "max_tokens": 5},
        common=bad.MESSAGES,
        opaque=OPAQUE,
        naming="message",
    ),
    "count": Place(
        "/v1/messages/count_tokens",
        CountTokensBody,
        {"messages": [HELLO]},
        common=bad.MESSAGES,
        opaque=OPAQUE | NOT_COUNTED,
        naming="message",
    ),
    "tgi": dialect_place("/generate", TgiBody, INPUTS),
    "tgi-stream": dialect_place("/generate_stream", TgiBody, INPUTS),
    "tgi-parameters": dialect_place("/", TgiParameters, INPUTS, within="parameters"),
    "tgi-grammar": dialect_place("/", TgiGrammar, INPUTS, within="parameters.grammar"),
    "light": dialect_place("/generate", LightBody, INPUTS, dialect="lightllm"),
    "light-parameters": dialect_place(
        "/generate_stream", LightParameters, INPUTS, within="parameters", dialect="lightllm"
    ),
    "tokens": dialect_place("/tokens", TokensBody, {"text": "a"}, "text", "parameters"),
    "chat": dialect_place("/api/chat", OllamaChatBody, CHAT, *LOGPROBS, "messages"),
    "chat-options": dialect_place("/api/chat", OllamaOptions, CHAT, within="options"),
    "chat-message": dialect_place("/api/chat", OllamaMessage, {"stream": False}, within="messages"),
    "prompt": dialect_place("/api/generate", OllamaGenerateBody, PROMPT, *LOGPROBS, "prompt"),
    "raw": dialect_place(
        "/api/generate", OllamaGenerateBody, {"raw": True, **PROMPT}, *LOGPROBS, "prompt"
    ),
    "show": dialect_place("/api/show", ShowBody, {"model": "tiny"}),
    "pull": dialect_place("/api/pull", PullBody, {"model": "tiny"}),
    "llama": Place("/completion", LlamaCompletionBody, {"prompt": "a"}, values=bad.LLAMACPP),
    "llama-tokens": Place("/tokenize", LlamaTokenizeBody, {"content": "a"}, values=bad.LLAMACPP),
    "llama-template": Place("/apply-template", ApplyTemplateBody, {"messages": [HELLO]}),
    "rtp": Place("/", RtpBody, {"prompt": "a"}, values=bad.RTP_LLM, objects=RTP_OBJECTS),
    "rtp-config": Place(
        "/",
        RtpConfig,
        {"prompt": "a"},
        "generate_config",
        values=bad.RTP_LLM,
        objects=RTP_OBJECTS,
    ),
    "rtp-tokens": Place(
        "/tokenizer/encode",
        TokenizerEncodeBody,
        {"prompt": "a"},
        values={**bad.RTP_LLM, "prompt": (1, ["a"], None)},
    ),
    "parse-calls": dialect_place("/parse_function_call", ParseCallsBody, PARSED, "text"),
    "separate": dialect_place(
        "/separate_reasoning", SeparateBody, {"text": "a", "reasoning_parser": "qwen3"}, "text"
    ),
}
SENT_NAMES = {"schema_": "schema"}
# An invalid field may be attributed to another field.
ELSEWHERE: Mapping[str, str] = {"text": "input_ids", "input_ids": "text"}


def body_with(place: Place, fields: dict[str, Any]) -> dict[str, Any]:
    if place.within == "messages":
        return {**place.valid, "messages": [{**HELLO, **fields}]}
    if place.model is TgiGrammar:
        fields = {"type": "json", "value": {}} | fields
    for part in reversed(place.within.split(".") if place.within else ()):
        fields = {part: fields}
    return {**place.valid, **fields}


def bad_values_of(place: Place, name: str) -> list[Any]:
    values = (*place.values.get(name, place.common.get(name, ())), *NOWHERE_VALID)
    return [v for v in values if not (isinstance(v, dict) and name in place.objects)]


@cache
def app_of(dialect: str, unknown_fields: str) -> ASGIApp:
    fields = {"unknown_fields": unknown_fields, "max_body_bytes": 10**6}
    return share_app(
        FakeServer(config=make_config(generate_dialect=dialect, tool_parser="hermes", **fields))
    )


async def post(place: Place, body: Any, unknown_fields: str = "reject") -> httpx.Response:
    # Unknown fields would be ignored otherwise, even in nested objects.
    async with client_of(app_of(place.dialect, unknown_fields)) as client:
        return await client.post(place.path, content=json.dumps(body))


@pytest.mark.parametrize(
    ("label", "name"),
    [
        (label, name)
        for label, place in PLACES.items()
        for name in sorted(place.model.model_fields.keys() - place.opaque)
    ],
)
async def test_a_bad_value_is_a_4xx_that_names_its_field(label: str, name: str) -> None:
    place = PLACES[label]
    sent = SENT_NAMES.get(name, name)
    for value in bad_values_of(place, name):
        response = await post(place, body_with(place, {sent: value}))

        found = f"{value!r:.80}: {response.text}"
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert response.status_code in (400, 404, 422), found
        assert 0 < len(message) < 600, found
        if place.naming is not None:
            assert error["type"] in ("invalid_request_error", "not_found_error"), found
            names = (sent, ELSEWHERE.get(name, sent))
            assert any(one in (error[place.naming] or "") for one in names), found


UNSUPPORTED = [
    (label, name)
    for label in ("openai-chat", "completions", "sglang")
    for name in sorted(FIELDS.keys() - PLACES[label].model.model_fields.keys())
]


@pytest.mark.parametrize(("label", "name"), UNSUPPORTED)
async def test_an_unsupported_field_is_refused_unless_it_asks_for_nothing(
    label: str, name: str
) -> None:
    place = PLACES[label]
    refused = await post(place, {**place.valid, name: {"x": 1}})

    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, name, "unsupported")
    for harmless in (None, *FIELDS[name][1]):
        taken = await post(place, {**place.valid, name: harmless})
        assert taken.status_code == 200
        assert "x-remora-ignored-fields" not in taken.headers


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ANY_BODY = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("label", list(PLACES))
@ANY_BODY
@given(data=st.data())
async def test_no_body_makes_a_500(label: str, data: st.DataObject) -> None:
    place = PLACES[label]
    names = st.sampled_from(sorted(place.model.model_fields)) | st.sampled_from(sorted(FIELDS))
    fields = data.draw(st.dictionaries(names | st.text(max_size=5), JSON_VALUES, max_size=4))

    response = await post(place, body_with(place, fields), "warn")

    assert response.status_code < 500, response.text
    if response.status_code >= 400 and place.naming == "param":
        error = response.json()["error"]
        if place.path == "/" and isinstance(error, str):
            return  # Infinity is no JSON, and the API of a body of / that cannot be read is TGI
        assert set(error) == {"message", "type", "param", "code"}


PIECES = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            [
                *("message", "function_call", "function_call_output", "reasoning", "text"),
                *("custom_tool_call", "custom_tool_call_output", "compaction"),
                *("document", "search_result"),
                *("input_text", "output_text", "thinking", "tool_use", "tool_result"),
            ]
        ),
        "role": st.sampled_from(["user", "assistant", "system", "developer"]),
        **dict.fromkeys(
            ("text", "content", "output", "summary", "arguments", "input", "thinking", "id"),
            JSON_VALUES,
        ),
        "encrypted_content": st.just("remora-summary:QQ==") | JSON_VALUES,
        "source": st.just({"type": "text", "data": "x"}) | JSON_VALUES,
        "title": st.just("x") | JSON_VALUES,
        "name": st.just("f") | JSON_VALUES,
        "call_id": st.just("c") | JSON_VALUES,
        "tool_use_id": st.just("c") | JSON_VALUES,
    },
)
ROLES = st.sampled_from(["user", "assistant", "system"])
TURNS = st.fixed_dictionaries({"role": ROLES, "content": st.lists(PIECES, max_size=3)})


@pytest.mark.parametrize("label", ["responses", "messages", "count"])
@ANY_BODY
@given(conversation=st.lists(PIECES | TURNS, max_size=4))
async def test_no_conversation_makes_a_500(label: str, conversation: list[Any]) -> None:
    place = PLACES[label]
    name = "input" if label == "responses" else "messages"

    response = await post(place, {**place.valid, name: conversation}, "warn")

    assert response.status_code < 500, response.text


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
