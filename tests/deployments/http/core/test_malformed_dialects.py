"""Whatever is sent to TGI's, LightLLM's and Ollama's routes: a 4xx in their shape, never a 500."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remora.deployments.http.core.fields import Body
from remora.deployments.http.core.unsupported_fields import FIELDS
from remora.deployments.http.lightllm.bodies import LightBody, LightParameters, TokensBody
from remora.deployments.http.ollama.bodies import (
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
    ShowBody,
)
from remora.deployments.http.sglang.parse_routes import ParseCallsBody, SeparateBody
from remora.deployments.http.tgi.bodies import TgiBody, TgiGrammar, TgiParameters
from tests.deployments.fakes import FakeServer, client_of, make_app, make_config
from tests.deployments.http.core.test_malformed import BOUNDS, JSON_VALUES, NOWHERE_VALID

HELLO = {"role": "user", "content": "Hi"}
ADD = {"type": "function", "function": {"name": "add"}}


class Place(NamedTuple):
    """Where the fields of a model stand: at `path`, in `within`, beside what makes it valid."""

    path: str
    model: type[Body]
    valid: Mapping[str, Any]
    within: str = ""
    dialect: str = "auto"


CHAT = {"messages": [HELLO], "stream": False}
PROMPT = {"prompt": "a", "stream": False}
PLACES = {
    "tgi": Place("/generate", TgiBody, {"inputs": "a"}),
    "tgi-stream": Place("/generate_stream", TgiBody, {"inputs": "a"}),
    "tgi-parameters": Place("/", TgiParameters, {"inputs": "a"}, "parameters"),
    "tgi-grammar": Place("/", TgiGrammar, {"inputs": "a"}, "parameters.grammar"),
    "light": Place("/generate", LightBody, {"inputs": "a"}, dialect="lightllm"),
    "light-parameters": Place(
        "/generate_stream", LightParameters, {"inputs": "a"}, "parameters", "lightllm"
    ),
    "tokens": Place("/tokens", TokensBody, {"text": "a"}),
    "chat": Place("/api/chat", OllamaChatBody, CHAT),
    "chat-options": Place("/api/chat", OllamaOptions, CHAT, "options"),
    "chat-message": Place("/api/chat", OllamaMessage, {"stream": False}, "messages"),
    "prompt": Place("/api/generate", OllamaGenerateBody, PROMPT),
    "raw": Place("/api/generate", OllamaGenerateBody, {"raw": True, **PROMPT}),
    "show": Place("/api/show", ShowBody, {"model": "tiny"}),
    "calls": Place(
        "/parse_function_call",
        ParseCallsBody,
        {"text": "a", "tools": [ADD], "tool_call_parser": "hermes"},
    ),
    "thought": Place(
        "/separate_reasoning", SeparateBody, {"text": "a", "reasoning_parser": "qwen3"}
    ),
}
OWN_BOUNDS: Mapping[str, tuple[Any, ...]] = {
    "inputs": (1, None, ["a"], ""),
    "parameters": (1, "x", [1]),
    "do_sample": (1, "true"),
    "best_of": (0, 17, True, "1"),
    "truncate": (0, -1, True),
    "top_n_tokens": (-1, 6, True),
    "watermark": (True, 1),
    "max_new_tokens": (0, -1, 1.5, True, 2**31, 10**30),
    "stop_sequences": ("", [""], ["x"] * 17, [[1, 2]], [[-1]], [[10**30]], 1),
    "allowed_token_ids": ([], [-1], [257], [10**30], [True], 1),
    "regular_constraint": ("", 1, "refused"),
    "guided_json": (1, "", "refused"),
    "guided_grammar": ("", 1),
    "multimodal_params": ({"images": [1]}, [1], 1),
    "move_kv_to_decode_node": (1,),
    "options": (1, "x", [1]),
    "num_predict": (-3, 1.5, True, 2**31),
    "typical_p": (0.5, "1"),
    "think": ("x", 1),
    "format": ("x", 1, [1]),
    "keep_alive": ([1], {"a": 1}, True),
    "images": (["eA=="], 1),
    "role": ("nobody", 1, None),
    "content": (1, [1]),
    "tool_calls": ([1], [{}], [{"function": {}}], [{"function": {"name": "a", "arguments": "{}"}}]),
    "tools": ([1], [{}], [{"type": "x"}], [ADD] * 129),
    "suffix": ("x", 1),
    "template": ("x",),
    "context": ([1],),
    "type": ("x", None),
    "value": (1, [], ""),
    "tool_call_parser": ("", "nope", 1, "x" * 65),
    "reasoning_parser": ("", "nope", 1),
}
# Fields in which anything may stand, any object, or what others of their name do not take.
OPAQUE = {"mirostat_tau", "mirostat_eta"}
OBJECTS = {"value", "guided_json", "format"}
TAKEN: Mapping[str, tuple[str, ...]] = {
    "tokens": ("text", "parameters"),
    "chat": ("logprobs", "top_logprobs", "messages", "truncate"),
    "prompt": ("prompt", "logprobs", "top_logprobs", "truncate"),
    "raw": ("prompt", "logprobs", "top_logprobs", "truncate"),
    "calls": ("text",),
    "thought": ("text",),
}


def body_with(place: Place, name: str, value: Any) -> dict[str, Any]:
    if not place.within:
        return {**place.valid, name: value}
    if place.within == "messages":
        return {**place.valid, "messages": [{**HELLO, name: value}]}
    inner: dict[str, Any] = {name: value}
    if place.model is TgiGrammar:
        inner = {"type": "json", "value": {}} | inner
    for part in reversed(place.within.split(".")):
        inner = {part: inner}
    return {**place.valid, **inner}


FIELDS_OF_PLACES = [
    (label, name)
    for label, place in PLACES.items()
    for name in sorted(place.model.model_fields.keys() - OPAQUE)
]


def bad_values(label: str, name: str) -> list[Any]:
    taken = TAKEN.get(label, ())
    own = () if name in taken else OWN_BOUNDS.get(name, BOUNDS.get(name, ()))
    may_be_object = name in {*OBJECTS, *taken}
    return [v for v in (*own, *NOWHERE_VALID) if not (isinstance(v, dict) and may_be_object)]


@cache
def app_of(label: str) -> FastAPI:
    # Unknown fields would be let through otherwise, those of nested objects too.
    dialect = PLACES[label].dialect
    config = make_config(generate_dialect=dialect, tool_parser="hermes", unknown_fields="reject")
    return make_app(FakeServer(config=config))


async def post(label: str, body: Any) -> httpx.Response:
    async with client_of(app_of(label)) as client:
        return await client.post(PLACES[label].path, content=json.dumps(body))


@pytest.mark.parametrize(("label", "name"), FIELDS_OF_PLACES)
async def test_a_bad_value_is_a_4xx_in_the_shape_of_its_dialect(label: str, name: str) -> None:
    for value in bad_values(label, name):
        response = await post(label, body_with(PLACES[label], name, value))

        told = f"{value!r:.80}: {response.text}"
        assert response.status_code in (400, 404, 422), told
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert 0 < len(message) < 600, told


@pytest.mark.parametrize("label", list(PLACES))
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
async def test_no_body_at_all_makes_a_500(label: str, data: st.DataObject) -> None:
    place = PLACES[label]
    names = st.sampled_from(sorted(place.model.model_fields)) | st.sampled_from(sorted(FIELDS))
    name, value = data.draw(names | st.text(max_size=5)), data.draw(JSON_VALUES)

    response = await post(label, body_with(place, name, value))

    assert response.status_code < 500, response.text
