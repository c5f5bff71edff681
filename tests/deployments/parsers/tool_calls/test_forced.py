"""Forced calls and structural tags: schemas that hold, and who reads what they let through."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import xgrammar

from remora.deployments.parsers.tool_calls.forced import forced_parser, forced_schema
from remora.deployments.parsers.tool_calls.formats import TOOL_FORMATS
from remora.deployments.parsers.tool_calls.structural_tags import MAX_CALLS
from remora.deployments.parsers.tools import Tool, ToolChoice, ToolUse
from tests.deployments.parsers.replies import KA, KB, KE, B, E, P, make_id, read

TREE = Tool(
    name="tree",
    strict=True,
    parameters={
        "$id": "https://example.org/tree",
        "type": "object",
        "properties": {
            "value": {"$ref": "#/$defs/Value"},
            "$ref": {"type": "string"},
            "next": {"$ref": "#"},
            "kind": {"const": {"$ref": "#/data"}},
        },
        "required": ["value"],
        "additionalProperties": False,
        "$defs": {"Value": {"type": "integer"}},
    },
)
OTHER = Tool(
    name="other",
    parameters={
        "properties": {"value": {"$ref": "#/$defs/Value"}},
        "$defs": {"Value": {"type": "string"}},
    },
)
REQUIRED = ToolUse(tools=(TREE, OTHER), choice=ToolChoice.REQUIRED)
NAMED = ToolUse(tools=(TREE, OTHER), choice=ToolChoice.NAMED, name="tree")


def make_call(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


def is_valid(use: ToolUse, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(forced_schema(use)).is_valid(value))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([make_call("tree", value=1, next={"value": 2})], True),
        ([make_call("tree", value=1, kind={"$ref": "#/data"})], True),
        ([make_call("other", value="x"), make_call("tree", value=1)], True),
        ([make_call("tree", value="x")], False),
        ([make_call("other", value=1)], False),
        ([make_call("tree", value=1, next={"value": "x"})], False),
        ([make_call("tree", **{"value": 1, "$ref": 5})], False),
        ([make_call("third")], False),
        ([make_call("other")] * MAX_CALLS, True),
        ([make_call("other")] * (MAX_CALLS + 1), False),
        ([], False),
    ],
)
def test_required_calls_match_the_schemas_of_their_tools(value: Any, expected: bool) -> None:
    assert is_valid(REQUIRED, value) is expected


def test_one_call_and_named_calls_match_their_schemas() -> None:
    one = ToolUse(tools=(OTHER,), choice=ToolChoice.REQUIRED, parallel=False)
    named_other = ToolUse(tools=(OTHER,), choice=ToolChoice.NAMED, name="other")

    assert is_valid(one, [make_call("other")])
    assert not is_valid(one, [make_call("other")] * 2)
    assert is_valid(NAMED, {"value": 1})
    assert not is_valid(NAMED, {"value": "x"})
    assert not is_valid(named_other, [])


@pytest.mark.parametrize(
    ("use", "pieces", "answer", "calls"),
    [
        (NAMED, ['{"value"', ": 1}\n"], "", [("tree", '{"value": 1}')]),
        (NAMED, [" no"], " no", []),
        (
            REQUIRED,
            [json.dumps([make_call("tree", value=1), make_call("other")])],
            "",
            [("tree", '{"value": 1}'), ("other", "{}")],
        ),
        (REQUIRED, ['[{"name": "tree", "parameters": {"val'], "", [("tree", '{"val')]),
    ],
)
def test_a_forced_reply_is_calls_or_else_text(
    use: ToolUse, pieces: list[str], answer: str, calls: list[tuple[str, str]]
) -> None:
    assert read(forced_parser(use, make_id), *pieces) == ("", answer, calls)


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    vocabulary = [chr(code) for code in range(32, 127)] + ["\n", "</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[len(vocabulary) - 1])
    return xgrammar.GrammarCompiler(info, max_threads=1)


DSML = '<｜DSML｜invoke name="tree">\n<｜DSML｜parameter name="value" string="false">'
GOOD_CALLS = [
    ("hermes", '<tool_call>\n{"name": "tree", "arguments": {"value": 1}}\n</tool_call>'),
    ("llama3", '{"name": "tree", "parameters": {"value": 1}}'),
    ("mistral", '[TOOL_CALLS]tree[ARGS]{"value": 1}'),
    ("mistral", '[TOOL_CALLS] [{"name": "tree", "arguments": {"value": 1}}]'),
    ("deepseek_v3", f'{B}function{P}tree\n```json\n{{"value": 1}}\n```{E}'),
    ("deepseek_v31", f'{B}tree{P}{{"value": 1}}{E}'),
    ("deepseek_v32", f"{DSML}1</｜DSML｜parameter>\n</｜DSML｜invoke>"),
    ("qwen3_coder", "<function=tree>\n<parameter=value>\n1\n</parameter>\n</function>"),
    ("seed_oss", "<function=tree>\n<parameter=value>\n1\n</parameter>\n</function>"),
    (
        "glm45",
        "<tool_call>tree\n<arg_key>value</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    ),
    ("kimi_k2", f'{KB}functions.tree:0{KA}{{"value": 1}}{KE}'),
]


def accepts(compiler: xgrammar.GrammarCompiler, name: str, text: str) -> bool:
    tag = {"type": "structural_tag", **(TOOL_FORMATS[name].structural_tag([TREE, OTHER]) or {})}
    compiled = compiler.compile_structural_tag(json.dumps(tag))
    return bool(xgrammar.GrammarMatcher(compiled).accept_string(text))


@pytest.mark.parametrize(("name", "call"), GOOD_CALLS)
def test_a_structural_tag_pins_strict_arguments_and_leaves_text_free(
    compiler: xgrammar.GrammarCompiler, name: str, call: str
) -> None:
    assert accepts(compiler, name, f"Well, then.\n{call}")
    assert not accepts(compiler, name, call.replace("1", '"x"'))
    assert not accepts(compiler, name, call.replace("tree", "third"))


@pytest.mark.parametrize(("name", "call"), GOOD_CALLS)
def test_what_a_structural_tag_lets_through_is_read_as_a_call(name: str, call: str) -> None:
    _, _, calls = read(TOOL_FORMATS[name].parser([TREE, OTHER], make_id=make_id), call)

    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("tree", {"value": 1})]


def test_only_strict_tools_need_a_structural_tag() -> None:
    assert TOOL_FORMATS["hermes"].structural_tag([OTHER]) is None
    assert TOOL_FORMATS["pythonic"].structural_tag([TREE]) is None


def test_every_name_leads_to_a_format_that_knows_it() -> None:
    assert all(name in (entry.name, *entry.aliases) for name, entry in TOOL_FORMATS.items())


@pytest.mark.parametrize(
    ("parameters", "takes"),
    [
        ({"type": "object", "properties": {}}, "nothing"),
        ({"type": "object", "properties": {}, "required": []}, "nothing"),
        ({"type": "object"}, "anything"),
        ({"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}, "texts"),
        ({"properties": {"a": {"type": "string"}}}, "a"),
    ],
)
def test_a_function_that_lists_no_properties_takes_none(
    parameters: dict[str, Any], takes: str
) -> None:
    enforced = Tool(name="f", parameters=parameters).enforced_parameters

    assert (enforced.get("additionalProperties") is False) == (takes == "nothing")
    assert enforced["type"] == "object"
    assert parameters.items() <= enforced.items()
