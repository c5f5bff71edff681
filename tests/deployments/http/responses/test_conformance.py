"""The Responses API as its own clients expect it: each request, its status, its events and fields.

Sources: the openai client's types, and OpenAI's reference of the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import pytest
from openai.types.responses import (
    CompactedResponse,
    Response,
    ResponseCompactionItem,
    ResponseStreamEvent,
)
from openai.types.responses import response_create_params as params
from pydantic import TypeAdapter

from remora.deployments.http.responses.bodies import PromptBody, ResponsesBody
from remora.engine.types import Request
from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_config, make_plan
from tests.deployments.http.responses.test_response import (
    ADD,
    REASONING_AND_CALL,
    SCHEMA,
    make_parsing_server,
    post,
)
from tests.deployments.http.responses.test_types import data_of, unknown_to

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Edits files"}
CUSTOM_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "a \\"b\\""}}\n</tool_call>'

# -- requests, and what answers them ------------------------------------------------------------

ONCE = {"input": "Hi"}
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 6,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]
Row = tuple[str, str, Any, int, Any]
ROWS: tuple[Row, ...] = (
    # method, path below /v1/responses, body, status, keys of the answer or its error's param
    ("POST", "", ONCE, 200, {"id", "object", "status", "output", "usage", "background"}),
    ("POST", "", ONCE | {"background": True}, 200, {"id", "status", "background"}),
    ("POST", "", {}, 400, "input"),
    ("POST", "", ONCE | {"previous_response_id": "resp_0"}, 400, "previous_response_id"),
    ("POST", "", ONCE | {"background": True, "store": False}, 400, "background"),
    ("POST", "", ONCE | {"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
    ("POST", "", ONCE | {"tools": [{"type": "mcp"}]}, 400, "tools[0].type"),
    ("POST", "", {"input": [{"type": "computer_call"}]}, 400, "input[0].type"),
    ("POST", "", {"input": [{"type": "compaction_trigger"}]}, 400, "input[0].type"),
    ("POST", "/input_tokens", ONCE, 200, {"object", "input_tokens"}),
    ("POST", "/input_tokens", {"input": None}, 400, "input"),
    ("POST", "/input_tokens", ONCE | {"model": "x"}, 404, "model"),
    ("GET", "/input_tokens", None, 404, None),
    ("POST", "/compact", ONCE, 200, {"id", "object", "created_at", "output", "usage"}),
    ("POST", "/compact", {}, 400, "input"),
    ("POST", "/compact", {"previous_response_id": "resp_0"}, 400, "previous_response_id"),
    ("POST", "/compact", ONCE | {"model": "x"}, 404, "model"),
    ("GET", "/ID", None, 200, {"id", "object", "status"}),
    ("GET", "/ID?stream=true", None, 400, "stream"),
    ("GET", "/ID?starting_after=1", None, 400, "starting_after"),
    ("GET", "/ID?starting_after=-1&stream=true", None, 400, "starting_after"),
    ("GET", "/ID/input_items", None, 200, {"object", "data", "first_id", "last_id", "has_more"}),
    ("POST", "/ID/cancel", {}, 400, None),
    ("GET", "/resp_0", None, 404, None),
    ("GET", "/resp_0?stream=true", None, 404, None),
    ("GET", "/resp_0/input_items", None, 404, None),
    ("POST", "/resp_0/cancel", {}, 404, None),
    ("DELETE", "/resp_0", None, 404, None),
    ("DELETE", "/ID", None, 200, {"id", "object", "deleted"}),
    ("PATCH", "/ID", {}, 405, None),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]} {row[2]}")
async def test_a_request_has_its_status_and_shape(row: Row) -> None:
    method, path, body, status, shape = row
    async with make_client() as client:
        id_ = (await client.post(PATH, json=ONCE)).json()["id"]
        response = await client.request(method, PATH + path.replace("ID", id_), json=body)

    found = response.json()
    assert response.status_code == status, response.text
    if status == 200:
        assert shape <= found.keys()
    else:
        assert found["error"].keys() == {"message", "type", "param", "code"}
        assert found["error"]["param"] == shape


EVENTS: Mapping[str, tuple[FakeServer, dict[str, Any], list[str]]] = {
    "text": (FakeServer(), {}, TEXT_EVENTS),
    "background": (
        FakeServer(),
        {"background": True},
        ["response.created", "response.queued", *TEXT_EVENTS[1:]],
    ),
    "cut off": (
        FakeServer(),
        {"max_output_tokens": 1},
        [*TEXT_EVENTS[:5], *TEXT_EVENTS[10:13], "response.incomplete"],
    ),
    "custom call": (
        make_parsing_server(f"x</think>{CUSTOM_CALL}"),
        {"tools": [PATCH], "include_reasoning": False},
        [
            *TEXT_EVENTS[:3],
            "response.custom_tool_call_input.delta",
            "response.custom_tool_call_input.done",
            *TEXT_EVENTS[-2:],
        ],
    ),
}


@pytest.mark.parametrize("name", EVENTS)
async def test_a_stream_has_its_events_in_order(name: str) -> None:
    server, fields, kinds = EVENTS[name]
    events = data_of(await post(server, **fields, stream=True))

    assert [event["type"] for event in events] == kinds
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert [n for n in unknown_to(EVENT.validate_python(event)) if "status" not in n] == []


# -- fields -------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """A request as the engine and the grammar compiler saw it, and its answer."""

    server: FakeServer
    request: Request
    answer: Any


Effect = Callable[[Sent], bool]


@dataclass(frozen=True)
class FieldRow:
    """A field: a value, and its effect.

    effect:  None = a hint, which changes nothing that the engine computes; a status = it is refused
    others:  fields that it needs
    """

    value: Any
    effect: Effect | int | None
    others: Mapping[str, Any] = field(default_factory=dict)


def sampling(name: str, value: Any) -> Effect:
    return lambda sent: bool(getattr(sent.request.sampling, name) == value)


def shown(name: str, value: Any) -> Effect:
    return lambda sent: bool(sent.answer[name] == value)


def prompted(text: str) -> Effect:
    return lambda sent: text in "".join(map(chr, sent.request.prompt_ids))


TOOLS = {"tools": [ADD]}
FIELDS: Mapping[str, FieldRow] = {
    "access_programs": FieldRow({"cyber": "standard"}, 400),
    "background": FieldRow(True, shown("background", True)),
    "cache_salt": FieldRow("s", lambda sent: sent.request.cache_salt == "s"),
    "chat_template_kwargs": FieldRow(
        {"x": 1}, lambda sent: sent.server.tokenizer.rendered[0]["x"] == 1
    ),
    "context_management": FieldRow([{"type": "compaction", "compact_threshold": 1000}], 400),
    "conversation": FieldRow("conv_1", 400),
    "frequency_penalty": FieldRow(0.5, sampling("frequency_penalty", 0.5)),
    "ignore_eos": FieldRow(True, sampling("ignore_eos", True)),
    "image": FieldRow({"context_compression": "auto"}, 400),
    "include": FieldRow(["message.output_text.logprobs"], sampling("logprobs", 0)),
    "include_reasoning": FieldRow(False, lambda sent: _kinds(sent.answer) == ["message"]),
    "include_stop_str_in_output": FieldRow(True, sampling("include_stop_in_output", True)),
    "input": FieldRow("Hello", prompted("<|user|>Hello")),
    "instructions": FieldRow("Be brief.", prompted("<|system|>Be brief.")),
    "logit_bias": FieldRow({"65": 5.0}, sampling("logit_bias", {65: 5.0})),
    "max_drafts": FieldRow(0, sampling("max_drafts", 0)),
    "max_output_tokens": FieldRow(2, shown("status", "incomplete")),
    "max_tool_calls": FieldRow(3, None),
    "metadata": FieldRow({"a": "b"}, None),
    "min_p": FieldRow(0.1, sampling("min_p", 0.1)),
    "min_tokens": FieldRow(2, sampling("min_tokens", 2)),
    "model": FieldRow("other", 404),
    "moderation": FieldRow({"model": "x"}, 400),
    "parallel_tool_calls": FieldRow(False, shown("parallel_tool_calls", False), TOOLS),
    "personality": FieldRow("friendly", 400),
    "presence_penalty": FieldRow(0.5, sampling("presence_penalty", 0.5)),
    "previous_response_id": FieldRow("resp_0", 400),
    "priority": FieldRow(3, lambda sent: sent.request.priority == 3),
    "prompt": FieldRow({"id": "pmpt_1"}, 400),
    "prompt_cache_key": FieldRow("k", None),
    "prompt_cache_options": FieldRow({"mode": "implicit", "ttl": "30m"}, None),
    "prompt_cache_retention": FieldRow("24h", None),
    "reasoning": FieldRow({"effort": "high"}, 400),
    "repetition_penalty": FieldRow(1.5, sampling("repetition_penalty", 1.5)),
    "safety_identifier": FieldRow("x", None),
    "seed": FieldRow(7, sampling("seed", 7)),
    "service_tier": FieldRow("flex", None),
    "skip_special_tokens": FieldRow(False, sampling("skip_special_tokens", False)),
    "stop": FieldRow("x", sampling("stop", ("x",))),
    "stop_token_ids": FieldRow([65], sampling("stop_token_ids", (65,))),
    "store": FieldRow(False, shown("store", False)),
    "stream": FieldRow(True, lambda sent: sent.answer is None),
    "stream_options": FieldRow({"include_obfuscation": False}, None, {"stream": True}),
    "temperature": FieldRow(0.5, sampling("temperature", 0.5)),
    "text": FieldRow(
        {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        lambda sent: len(sent.server.grammars.asked) == 1,
    ),
    "tool_choice": FieldRow("required", lambda sent: bool(sent.server.grammars.asked), TOOLS),
    "tools": FieldRow([PATCH], lambda sent: "patch" in str(sent.server.tokenizer.rendered)),
    "top_k": FieldRow(5, sampling("top_k", 5)),
    "top_logprobs": FieldRow(2, sampling("logprobs", 2)),
    "top_p": FieldRow(0.5, sampling("top_p", 0.5)),
    "truncation": FieldRow("auto", shown("truncation", "auto")),
    "user": FieldRow("u", None),
}


def _kinds(answer: Any) -> list[str]:
    return [item["type"] for item in answer["output"]]


async def send(**fields: Any) -> tuple[httpx.Response, FakeServer]:
    server = make_parsing_server("Hm.</think>Paris.")
    return await post(server, **fields), server


@pytest.mark.parametrize("name", FIELDS)
async def test_a_field_has_its_effect_or_is_refused_by_name(name: str) -> None:
    row = FIELDS[name]
    response, server = await send(**dict(row.others), **{name: row.value})

    if isinstance(row.effect, int):
        assert response.status_code == row.effect, response.text
        assert response.json()["error"]["param"].startswith(name)
        return
    assert response.status_code == 200, response.text
    assert "x-remora-ignored-fields" not in response.headers
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    while not server.client.requests:  # of a response that is made in the background
        await asyncio.sleep(0)
    (request,) = server.client.requests
    if row.effect is not None:
        assert row.effect(Sent(server, request, None if is_stream else response.json()))
        return
    _, other = await send(**dict(row.others))
    (plain,) = other.client.requests
    assert (request.prompt_ids, request.sampling) == (plain.prompt_ids, plain.sampling)


def test_every_field_of_the_client_and_of_the_body_is_in_the_table() -> None:
    clients = params.ResponseCreateParamsBase.__annotations__.keys() | {"stream"}
    ours = ResponsesBody.model_fields.keys() | PromptBody.model_fields.keys()

    assert sorted(clients - FIELDS.keys()) == []
    assert sorted(FIELDS.keys() ^ ours) == []


async def test_verbosity_is_a_hint_that_the_answer_repeats() -> None:
    response, _ = await send(text={"verbosity": "low"})
    assert response.json()["text"] == {"format": {"type": "text"}, "verbosity": "low"}


# -- tools and items ----------------------------------------------------------------------------


async def test_a_custom_tool_takes_and_gives_plain_text() -> None:
    server = make_parsing_server(f"x</think>{CUSTOM_CALL}")
    answer = (await post(server, tools=[PATCH], tool_choice="auto")).json()
    (call,) = [item for item in answer["output"] if item["type"] == "custom_tool_call"]
    (tool,) = server.tokenizer.rendered[0]["tools"]

    assert (call["name"], call["input"]) == ("patch", 'a "b"')
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert answer["tools"] == [PATCH | {"format": {"type": "text"}}]
    assert [n for n in unknown_to(Response.model_validate(answer)) if "status" not in n] == []

    server = FakeServer()
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    again = await post(server, input=[{"role": "user", "content": "x"}, *answer["output"], output])
    messages = server.tokenizer.rendered[-1]["messages"]
    assert again.status_code == 200
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"input": 'a "b"'}
    assert messages[2] == {"role": "tool", "content": "done", "tool_call_id": call["call_id"]}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "patch"},
        {"type": "allowed_tools", "mode": "required", "tools": [PATCH]},
    ],
)
async def test_a_custom_tool_is_chosen_by_name(choice: dict[str, Any]) -> None:
    server = make_parsing_server("x")
    response = await post(server, tools=[PATCH, ADD], tool_choice=choice)

    assert response.status_code == 200, response.text
    assert server.grammars.asked


async def test_a_custom_call_is_continued_and_one_that_is_cut_off_is_not() -> None:
    room = len(f"x</think>{CUSTOM_CALL}".removesuffix('"}}\n</tool_call>'))
    for limit, roles in ((None, ["user", "assistant", "user"]), (room, ["user", "user"])):
        server = make_parsing_server(f"x</think>{CUSTOM_CALL}")
        async with make_client(server) as client:
            body = {"input": "Hi", "tools": [PATCH], "include_reasoning": False}
            made = await client.post(PATH, json=body | {"max_output_tokens": limit})
            more = {"input": "And?", "previous_response_id": made.json()["id"]}
            assert (await client.post(PATH, json=more)).status_code == 200
        messages = server.tokenizer.rendered[-1]["messages"]
        assert [message["role"] for message in messages] == roles


# -- tokens, compaction, truncation -------------------------------------------------------------


async def test_counted_tokens_are_those_of_the_responses_prompt() -> None:
    body = {"input": "Hi", "instructions": "Be brief.", "tools": [ADD]}
    async with make_client(make_parsing_server(REASONING_AND_CALL)) as client:
        made = (await client.post(PATH, json=body)).json()
        counted = (await client.post(f"{PATH}/input_tokens", json=body)).json()
        more = {"input": "And?", "previous_response_id": made["id"]}
        longer = (await client.post(f"{PATH}/input_tokens", json=more)).json()
        usage = (await client.post(PATH, json=more)).json()["usage"]

    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": made["usage"]["input_tokens"],
    }
    assert longer["input_tokens"] == usage["input_tokens"]


async def test_a_conversation_is_compacted_and_goes_on() -> None:
    server = make_parsing_server("Hm.</think>Paris it was.")
    async with make_client(server) as client:
        first = (await client.post(PATH, json={"input": "Capital?"})).json()
        compacted = await client.post(
            f"{PATH}/compact", json={"previous_response_id": first["id"], "input": "Sure?"}
        )
        found = compacted.json()
        rendered = server.tokenizer.rendered[-1]["messages"]
        body = {"input": [*found["output"], {"role": "user", "content": "And?"}]}
        again = await client.post(PATH, json=body)
        kept = (await client.get(f"{PATH}/{again.json()['id']}/input_items")).json()["data"]

    assert found.keys() == CompactedResponse.model_fields.keys() - {"image"}
    assert unknown_to(ResponseCompactionItem.model_validate(found["output"][2])) == []
    assert [item["type"] for item in found["output"]] == ["message", "message", "compaction"]
    assert [m["content"] for m in rendered[:3]] == ["Capital?", "Paris it was.", "Sure?"]
    assert rendered[3]["content"].startswith("Summarize")
    assert server.client.requests[1].sampling.max_tokens is not None
    assert again.status_code == 200, again.text
    messages = server.tokenizer.rendered[-1]["messages"]
    assert [m["content"] for m in messages] == ["Capital?", "Sure?", "Paris it was.", "And?"]
    assert kept[1]["id"] == found["output"][2]["id"]


def _long(num_turns: int) -> list[dict[str, Any]]:
    turn = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y" * 40}]
    return [*turn * num_turns, {"role": "user", "content": "Last?"}]


async def test_the_oldest_turns_are_left_out_only_where_truncation_is_auto() -> None:
    server = FakeServer(plan=make_plan(max_model_len=300))
    fields = {"input": _long(4), "instructions": "Be brief.", "max_output_tokens": 20}
    refused = await post(server, **fields)
    taken = await post(server, **fields, truncation="auto")
    kept = server.tokenizer.rendered[-1]["messages"]
    (request,) = server.client.requests
    too_long = await post(server, input="x" * 400, truncation="auto")

    assert (refused.status_code, too_long.status_code) == (400, 400)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert taken.status_code == 200
    assert kept[-1]["content"] == "Last?"
    prompt = "".join(map(chr, request.prompt_ids))
    assert prompt.startswith("<|system|>Be brief.<|user|>xxx")
    assert prompt.count("<|user|>") == 3  # one turn more would not fit
    assert len(prompt) + 20 <= 300


async def test_the_store_is_needed_to_continue() -> None:
    server = FakeServer(FakeEngine(), config=make_config(response_store="none"))
    refused = await post(server, background=True)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "unsupported")
    assert "api.response_store" in error["message"]
