"""Tools of a chat: valid requests, the engine's constraint, and the response."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from remora.engine.grammar.constraint import ConstraintKind
from tests.deployments.fakes import (
    CharTokenizer,
    FakeEngine,
    FakeGrammar,
    FakeServer,
    make_client,
    make_config,
)
from tests.deployments.http.streams import ask

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def make_tool(name: str = "add", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **fields}}


def make_server(text: str = "Paris.", **api: Any) -> FakeServer:
    return FakeServer(FakeEngine(text=text), config=make_config(**{"tool_parser": "hermes"} | api))


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


async def post(server: FakeServer | None = None, **fields: Any) -> httpx.Response:
    return await ask(PATH, server or make_server(), **{"messages": HELLO} | fields)


def grammar_kind(server: FakeServer) -> ConstraintKind | None:
    grammar = server.client.requests[0].grammar
    assert grammar is None or isinstance(grammar, FakeGrammar)
    return grammar.constraint.kind if grammar else None


CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.observes("api.tool_parser")
async def test_without_a_known_format_auto_is_refused_by_name_and_the_others_work() -> None:
    def server() -> FakeServer:
        return make_server('{"a": 1}', tool_parser="none")

    auto = await post(server(), tools=[make_tool()])
    forced = await post(server(), tools=[make_tool()], tool_choice=named("add"))

    assert (auto.status_code, auto.json()["error"]["param"]) == (400, "tool_choice")
    assert forced.status_code == 200


TWO_CALLS = '[{"name": "add", "parameters": {"a": 1}}, {"name": "sub", "parameters": {"a": 2}}]'


@pytest.mark.parametrize(
    ("text", "fields", "sample"),
    [
        ("<tool_call>nothing", {}, 'format="hermes",kind="malformed"'),
        (CALL_TEXT.replace("add", "sub"), {}, 'format="hermes",kind="unknown_tool"'),
        ('{"a": ', {"tool_choice": named("add")}, 'format="forced",kind="unfinished"'),
    ],
)
async def test_operators_see_how_many_calls_are_faulty(
    text: str, fields: dict[str, Any], sample: str
) -> None:
    server = make_server(text)
    async with make_client(server) as client:
        body = {"messages": HELLO, "tools": [make_tool()]} | fields
        await client.post(PATH, json=body)
        await client.post(PATH, json=body | {"stream": True})
        metrics = (await client.get("/metrics")).text

    (line,) = [x for x in metrics.splitlines() if x.startswith("remora_tool_call_faults_total{")]
    assert sample in line
    assert line.endswith(" 2.0")


async def test_the_template_sees_tools_unless_none_may_be_called() -> None:
    server = make_server()

    await post(server, tools=[make_tool()])
    await post(server, tools=[make_tool()], tool_choice="none")
    await post(server, tools=[])

    assert isinstance(server.tokenizer, CharTokenizer)
    assert [call["tools"] for call in server.tokenizer.rendered] == [[make_tool()], None, None]


JSON_ANSWER = {"response_format": {"type": "json_object"}}
SCHEMA_ANSWER = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "c", "schema": {"properties": {"c": {"type": "integer"}}}},
    }
}
TAG_ANSWER = {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<f="]}}


@pytest.mark.parametrize(
    ("strict", "fields", "kind"),
    [
        (True, {}, ConstraintKind.STRUCTURAL_TAG),
        (False, {}, None),
        (True, {"tool_choice": "none"}, None),
        (True, {"tool_choice": "none"} | JSON_ANSWER, ConstraintKind.JSON_OBJECT),
        (False, {"tool_choice": "required"}, ConstraintKind.JSON_SCHEMA),
        (False, {"tool_choice": named("add")}, ConstraintKind.JSON_SCHEMA),
    ],
)
async def test_calls_are_held_to_schemas_where_they_are_strict_or_forced(
    strict: bool, fields: dict[str, Any], kind: ConstraintKind | None
) -> None:
    server = make_server()
    await post(server, tools=[make_tool(strict=strict)], **fields)
    assert grammar_kind(server) is kind


@pytest.mark.parametrize("fields", [JSON_ANSWER, SCHEMA_ANSWER, TAG_ANSWER, {"regex": "[0-9]"}])
async def test_beside_free_tools_a_reply_is_calls_or_the_answer_asked_for(
    fields: dict[str, Any],
) -> None:
    calling, answering = make_server(CALL_TEXT), make_server('{"c": 1}')

    call = (await post(calling, tools=[make_tool()], **fields)).json()["choices"][0]
    answer = (await post(answering, tools=[make_tool()], **fields)).json()["choices"][0]

    assert grammar_kind(calling) is ConstraintKind.STRUCTURAL_TAG
    assert (call["finish_reason"], call["message"]["content"]) == ("tool_calls", None)
    assert call["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert (answer["finish_reason"], answer["message"]["content"]) == ("stop", '{"c": 1}')


@pytest.mark.parametrize("fields", [JSON_ANSWER, JSON_ANSWER | {"tool_choice": "required"}])
async def test_calls_or_answers_are_held_to_once_the_reasoning_has_ended(
    fields: dict[str, Any],
) -> None:
    text = f"So be it.</think>\n\n{CALL_TEXT}" if len(fields) == 1 else "So be it.</think>\n\n[]"
    server = make_server(text, reasoning_parser="deepseek-r1")

    body = (await post(server, tools=[make_tool()], **fields)).json()

    (request,) = server.client.requests
    assert request.grammar is not None
    assert request.reasoning is not None
    assert request.reasoning.end == "</think>"
    assert body["choices"][0]["message"]["reasoning"] == "So be it."


async def test_gpt_oss_calls_before_an_answer_that_is_held_to_the_constraint_alone() -> None:
    call = (
        "<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json"
        '<|message|>{"a": 1}<|call|>'
    )
    server = make_server(f"Hm.{call}", tool_parser="gpt-oss")
    messages = [{"role": "user", "content": "<|start|>assistant<|channel|>analysis<|message|>"}]

    body = (await post(server, messages=messages, tools=[make_tool()], **JSON_ANSWER)).json()

    message = body["choices"][0]["message"]
    assert grammar_kind(server) is ConstraintKind.JSON_OBJECT
    assert (message["content"], message["reasoning"]) == (None, "Hm.")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("choice", ["required", named("add")])
async def test_a_response_format_says_nothing_of_a_reply_that_has_to_be_calls(choice: Any) -> None:
    server = make_server('[{"name": "add", "parameters": {"a": 1}}]')

    response = await post(server, tools=[make_tool()], tool_choice=choice, **SCHEMA_ANSWER)

    assert response.status_code == 200
    assert grammar_kind(server) is ConstraintKind.JSON_SCHEMA
    grammar = server.client.requests[0].grammar
    assert isinstance(grammar, FakeGrammar)
    assert '"integer"' in grammar.constraint.source
    assert '"c"' not in grammar.constraint.source


async def test_outlines_says_that_it_cannot_hold_calls_or_an_answer() -> None:
    server = make_server()
    section = server.config.grammar.model_copy(update={"backend": "outlines"})
    server.config = server.config.model_copy(update={"grammar": section})

    response = await post(server, tools=[make_tool()], **JSON_ANSWER)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
    assert (await post(server, tools=[make_tool()], tool_choice="none", **JSON_ANSWER)).is_success


@pytest.mark.parametrize(
    ("tool", "schema", "param"),
    [
        (make_tool(), {"const": "refused"}, "response_format"),
        (make_tool(strict=True, parameters={"description": "refused"}), {}, "tools"),
    ],
)
async def test_what_cannot_be_compiled_is_named(
    tool: dict[str, Any], schema: dict[str, Any], param: str
) -> None:
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    response = await post(make_server(), tools=[tool], response_format=answer)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_schema_that_is_a_wish_leaves_calls_or_any_json() -> None:
    server = make_server()
    named_schema = {"name": "x", "schema": {"const": "refused"}, "strict": False}
    answer = {"type": "json_schema", "json_schema": named_schema}

    response = await post(server, tools=[make_tool()], response_format=answer)

    assert response.status_code == 200
    assert grammar_kind(server) is ConstraintKind.STRUCTURAL_TAG


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_are_all_that_the_model_may_call(mode: str) -> None:
    server = make_server()
    allowed = {"mode": mode, "tools": [named("sub")]}
    tools = [make_tool(), make_tool("sub")]

    response = await post(
        server, tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )

    assert response.status_code == 200
    assert isinstance(server.tokenizer, CharTokenizer)
    assert server.tokenizer.rendered[0]["tools"] == [make_tool("sub")]


@pytest.mark.parametrize("name", ["a" * 128, "mcp.server-1_x"])
async def test_names_of_tools_are_taken_up_to_128_characters(name: str) -> None:
    assert (await post(tools=[make_tool(name)])).status_code == 200


async def test_documents_are_for_templates_that_know_them() -> None:
    knows = FakeServer(tokenizer=CharTokenizer("documents"))
    documents = [{"title": "t", "text": "x"}]

    taken, unknown = await post(knows, documents=documents), await post(documents=documents)

    assert (taken.status_code, unknown.status_code) == (200, 400)
    assert knows.tokenizer.rendered[0]["documents"] == documents
    assert unknown.json()["error"]["code"] == "unsupported"
