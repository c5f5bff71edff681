"""Replies that are calls or, instead, an answer of a form that the client asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remora.deployments.parsers.response_template import CheckpointFormat
from remora.deployments.parsers.tool_calls.formats import TOOL_FORMATS
from remora.deployments.parsers.tool_calls.grammars import calls_or
from remora.deployments.parsers.tool_calls.structural_tags import MAX_CALLS, Tag
from remora.deployments.parsers.tools import Tool, ToolChoice, ToolUse
from remora.engine.grammar.constraint import Constraint, ConstraintError, ConstraintKind
from tests.deployments.parsers.replies import BS, ES, KA, KB, KE, B, E, P
from tests.deployments.parsers.test_response_template import NAMED, TAGGED
from tests.engine.grammar.walks import accepts, make_grammar

K = ConstraintKind
SCHEMA = {"type": "object", "properties": {"c": {"type": "integer"}}, "required": ["c"]}
ANSWER = Constraint(kind=K.JSON_SCHEMA, source=json.dumps(SCHEMA))
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def make_use(*, parallel: bool = True, **fields: Any) -> ToolUse:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = (Tool(name="add", parameters=schema, **fields), Tool(name="now", parameters={}))
    return ToolUse(tools=tools, choice=ToolChoice.AUTO, parallel=parallel)


def make_calls(name: str = "hermes", use: ToolUse | None = None) -> Tag:
    tag = TOOL_FORMATS[name].calls_alone(use or make_use())
    assert tag is not None
    return tag


def grammar_of(name: str, answer: Constraint = ANSWER, use: ToolUse | None = None) -> Any:
    held = calls_or(make_calls(name, use), answer)
    assert held.kind is K.STRUCTURAL_TAG
    return make_grammar("xgrammar", held.kind, held.source)


CALLS = {
    "hermes": [HERMES, f"{HERMES}\n{HERMES}"],
    "granite": [
        '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]',
        '<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
    ],
    "llama3": [
        '{"name": "add", "parameters": {"a": 1}}',
        '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
    ],
    "llama4": ["[add(a=1)]", "[add(a=1), now()]", "[now()]"],
    "mistral": [
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
    ],
    "deepseek_v3": [f'{BS}{B}function{P}add\n```json\n{{"a": 1}}\n```{E}{ES}'],
    "deepseek_v31": [f'{BS}{B}add{P}{{"a": 1}}{E}{B}now{P}{{}}{E}{ES}'],
    "deepseek_v32": [
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</tool_call>"
    ],
    "seed_oss": [
        "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n"
        "</seed:tool_call>"
    ],
    "glm45": ["<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"],
    "kimi_k2": [
        f'<|tool_calls_section_begin|>{KB}functions.add:0{KA}{{"a": 1}}{KE}'
        "<|tool_calls_section_end|>"
    ],
}


@pytest.mark.parametrize("name", sorted({entry.name for entry in TOOL_FORMATS.values()}))
def test_a_reply_is_calls_of_the_models_format_or_the_answer_asked_for(name: str) -> None:
    grammar = grammar_of(name)

    for text in CALLS[name]:
        assert accepts(grammar, text), text
    assert accepts(grammar, '{"c": 1}')
    assert not accepts(grammar, '{"d": 1}')
    assert not accepts(grammar, "Let me see.")
    assert not accepts(grammar, f"Well: {CALLS[name][0]}")
    assert not accepts(grammar, CALLS[name][0].replace("add", "sub").replace("now", "sub"))


def test_strict_tools_keep_their_schemas_and_others_take_any_object() -> None:
    other = HERMES.replace('{"a": 1}', '{"b": 1}')

    assert accepts(grammar_of("hermes"), other)
    assert not accepts(grammar_of("hermes", use=make_use(strict=True)), other)


def test_calls_do_not_go_on_for_ever() -> None:
    grammar = grammar_of("hermes")

    assert accepts(grammar, HERMES * MAX_CALLS)
    assert not accepts(grammar, HERMES * (MAX_CALLS + 1))


def test_one_call_where_no_more_are_wanted() -> None:
    grammar = grammar_of("hermes", use=make_use(parallel=False))

    assert accepts(grammar, HERMES)
    assert not accepts(grammar, f"{HERMES}\n{HERMES}")


TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [
        {
            "type": "tag",
            "begin": "<f=a>",
            "content": {"type": "json_schema", "json_schema": SCHEMA},
            "end": "</f>",
        }
    ],
}


@pytest.mark.parametrize(
    ("kind", "source", "text", "other"),
    [
        (K.JSON_OBJECT, "", '{"x": [1]}', "[1]"),
        (K.REGEX, "[0-9]{2}", "12", "1"),
        (K.CHOICE, '["yes", "no"]', "no", "maybe"),
        (K.EBNF, 'root ::= "a" root | "b"', "aab", "a"),
        (K.STRUCTURAL_TAG, json.dumps({"format": TRIGGERED}), 'So: <f=a>{"c": 1}</f>', "<f=a>{}"),
        (
            K.STRUCTURAL_TAG,
            json.dumps(
                {
                    "triggers": ["<f="],
                    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
                }
            ),
            'So: <f=a>{"c": 1}</f>',
            "<f=a>{}",
        ),
    ],
)
def test_every_kind_of_answer_stands_beside_calls(
    kind: ConstraintKind, source: str, text: str, other: str
) -> None:
    grammar = grammar_of("hermes", Constraint(kind=kind, source=source))

    assert accepts(grammar, HERMES)
    assert accepts(grammar, text)
    assert not accepts(grammar, other)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (K.JSON_SCHEMA, "{"),
        (K.JSON_SCHEMA, "[" * 100_000),
        (K.STRUCTURAL_TAG, "[]"),
        (K.STRUCTURAL_TAG, '{"structures": [1], "triggers": []}'),
    ],
)
def test_an_answer_that_cannot_be_read_is_refused(kind: ConstraintKind, source: str) -> None:
    with pytest.raises(ConstraintError):
        calls_or(make_calls(), Constraint(kind=kind, source=source))


def checkpoint_calls(template: dict[str, Any], parallel: bool = True) -> Tag | None:
    return CheckpointFormat(template).calls_alone(make_use(parallel=parallel))


@pytest.mark.parametrize(
    ("template", "call"),
    [(TAGGED, '<tool_call>{"name": "add"}</tool_call>'), (NAMED, "<f=add><p=a>1</p></f>")],
)
def test_calls_of_a_checkpoints_own_template_stand_beside_an_answer(
    template: dict[str, Any], call: str
) -> None:
    calls = checkpoint_calls(template)
    assert calls is not None
    held = calls_or(calls, ANSWER)
    grammar = make_grammar("xgrammar", held.kind, held.source)

    assert accepts(grammar, call)
    assert accepts(grammar, f"{call}\n{call}")
    assert accepts(grammar, '{"c": 1}')
    assert not accepts(grammar, f"Well: {call}")
    assert not accepts(grammar, '{"d": 1}')


def test_calls_whose_end_is_a_pattern_cannot_be_told_to_a_grammar() -> None:
    calls = TAGGED["fields"]["tool_calls"]
    pattern = {key: value for key, value in calls.items() if key != "close"}
    fields = {**TAGGED["fields"], "tool_calls": {**pattern, "close_pattern": "</tool_call>+"}}

    assert checkpoint_calls({**TAGGED, "fields": fields}) is None
