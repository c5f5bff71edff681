"""The constraint of a body under each of its field names, and invalid combinations."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from remora.engine.grammar.constraint import Constraint, ConstraintKind
from tests.deployments.fakes import FakeGrammar, FakeServer, make_server_config
from tests.deployments.http.streams import ask

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "a"},
}
FORMAT = "response_format"
TAG = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
OLD_TAGS = {"type": "structural_tag", "structures": [TAG], "triggers": ["<f"]}
NEW_TAGS = {"type": "structural_tag", "format": {"type": "any_text"}}


async def post(path: str, server: FakeServer | None = None, **fields: Any) -> httpx.Response:
    return await ask(path, server, **BODIES[path] | fields)


def named(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", **fields}}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        ({FORMAT: {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA, FORMAT),
        ({"response_format": named(schema=SCHEMA)}, "json_schema", SCHEMA, "response_format"),
        ({FORMAT: named(schema=SCHEMA, strict=True)}, "json_schema", SCHEMA, FORMAT),
        ({"response_format": OLD_TAGS}, "structural_tag", OLD_TAGS, "response_format"),
        ({"response_format": NEW_TAGS}, "structural_tag", NEW_TAGS, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"], "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= a"}}, "ebnf", "root ::= a", None),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs"),
        ({"structured_outputs": {"structural_tag": json.dumps(NEW_TAGS)}}, None, NEW_TAGS, None),
        ({"structured_outputs": {"regex": "a", "json": None}}, "regex", "a", "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "disable_fallback": False}}, "regex", "a", None),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
        ({"guided_choice": ["a", "é"]}, "choice", ["a", "é"], "guided_choice"),
        ({"guided_grammar": "root ::= a"}, "ebnf", "root ::= a", "guided_grammar"),
        ({"guided_json_object": True}, "json_object", "", "guided_json_object"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "json_schema"),
        ({"regex": "a"}, "regex", "a", "regex"),
        ({"ebnf": "root ::= a"}, "ebnf", "root ::= a", "ebnf"),
        ({"grammar": "root ::= a"}, "ebnf", "root ::= a", "grammar"),
        ({"structural_tag": NEW_TAGS}, "structural_tag", NEW_TAGS, "structural_tag"),
        ({"regex": "a", "guided_decoding_backend": "xgrammar"}, "regex", "a", "regex"),
        ({"regex": "a", "response_format": {"type": "text"}}, "regex", "a", "regex"),
        ({"regex": "a", "guided_json_object": False, "min_tokens": 3}, "regex", "a", "regex"),
    ],
)
async def test_each_name_of_a_constraint_reaches_the_engine(
    path: str, fields: dict[str, Any], kind: str | None, source: Any, param: str | None
) -> None:
    server = FakeServer()

    response = await post(path, server, **fields)

    assert response.status_code == 200, response.text
    ((constraint, asked_by),) = server.grammars.asked
    grammar = server.client.requests[0].grammar
    assert isinstance(grammar, FakeGrammar)
    assert grammar.constraint is constraint
    assert constraint.kind == (kind or constraint.kind)
    found = constraint.source if isinstance(source, str) else json.loads(constraint.source)
    assert found == source
    assert asked_by.startswith(param or "structured_outputs")
    assert "x-remora-ignored-fields" not in response.headers


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {}},
        {"guided_json_object": False},
    ],
)
async def test_what_asks_for_nothing_constrains_nothing(path: str, fields: dict[str, Any]) -> None:
    server = FakeServer()

    assert (await post(path, server, **fields)).status_code == 200

    assert server.client.requests[0].grammar is None


RULES = 'root ::= "a"'
OBJECT = {"type": "object"}
JSON_SCHEMA = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        *(
            ("/generate", {"text": "a", "sampling_params": {name: value}}, kind)
            for name, value, kind in (
                ("json_schema", '{"type": "object"}', "json_schema"),
                ("json_schema", OBJECT, "json_schema"),
                ("regex", "a+", "regex"),
                ("ebnf", RULES, "ebnf"),
                ("structural_tag", '{"triggers": []}', "structural_tag"),
            )
        ),
        *(
            ("/generate", {"inputs": "a", "parameters": {"grammar": grammar}}, kind)
            for grammar, kind in (
                ({"type": "json", "value": OBJECT}, "json_schema"),
                ({"type": "json", "value": '{"type": "object"}'}, "json_schema"),
                ({"type": "json_schema", "value": {"name": "x", "schema": {}}}, "json_schema"),
                ({"type": "regex", "value": "a+"}, "regex"),
            )
        ),
        *(
            ("lightllm", {"inputs": "a", "parameters": {name: value}}, kind)
            for name, value, kind in (
                ("regular_constraint", "a+", "regex"),
                ("guided_json", OBJECT, "json_schema"),
                ("guided_json", '{"type": "object"}', "json_schema"),
                ("guided_grammar", RULES, "ebnf"),
            )
        ),
        ("/api/chat", {"messages": HELLO, "format": "json"}, "json_object"),
        ("/api/chat", {"messages": HELLO, "format": OBJECT}, "json_schema"),
        ("/v1/messages", {"output_config": {"format": JSON_SCHEMA}}, "json_schema"),
        ("/v1/messages", {"output_format": JSON_SCHEMA}, "json_schema"),
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}, "json_object"),
        (
            "/v1/responses",
            {"text": {"format": JSON_SCHEMA | {"name": "x"}}},
            "json_schema",
        ),
    ],
)
async def test_each_api_has_its_own_names_of_constraints(
    path: str, body: dict[str, Any], kind: str
) -> None:
    dialect = "lightllm" if path == "lightllm" else "auto"
    server = FakeServer(config=make_server_config(api={"generate_dialect": dialect}))
    usual: dict[str, Any] = {
        "/v1/messages": {"messages": HELLO, "max_tokens": 9},
        "/v1/responses": {"input": "a"},
    }

    path = "/generate" if path == "lightllm" else path
    response = await ask(path, server, **usual.get(path, {}), **body)

    assert response.status_code == 200, response.text
    ((constraint, asked_by),) = server.grammars.asked
    assert constraint.kind == kind
    for name in body.get("sampling_params", ()):
        assert asked_by == f"sampling_params.{name}"
    grammar = server.client.requests[0].grammar
    assert isinstance(grammar, FakeGrammar)
    assert grammar.constraint is constraint


async def test_what_cannot_be_compiled_is_refused_before_anything_runs() -> None:
    server = FakeServer()

    response = await post("/v1/completions", server, regex="refused")

    assert (response.status_code, response.json()["error"]["param"]) == (400, "regex")
    assert server.client.requests == []


async def test_a_schema_that_is_but_a_wish_gives_way_to_any_json() -> None:
    server = FakeServer()
    schema = {"description": "refused"}

    wish = await post("/v1/completions", server, response_format=named(schema=schema, strict=False))
    order = await post("/v1/completions", server, response_format=named(schema=schema))

    assert (wish.status_code, order.status_code) == (200, 400)
    grammar = server.client.requests[0].grammar
    assert isinstance(grammar, FakeGrammar)
    assert grammar.constraint == Constraint(kind=ConstraintKind.JSON_SCHEMA, source="{}")


async def test_a_backend_is_told_by_the_configuration() -> None:
    server = FakeServer(config=make_server_config(grammar={"backend": "outlines"}))

    response = await post("/v1/completions", server, regex="a", guided_decoding_backend="outlines")

    assert response.status_code == 200
