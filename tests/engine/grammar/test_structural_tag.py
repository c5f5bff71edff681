"""What only xgrammar takes: structural tags of both forms, grammars, and any JSON object."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remora.engine.grammar.constraint import ConstraintError, ConstraintKind
from tests.engine.grammar.walks import accepts, make_grammar, walks

K = ConstraintKind
SCHEMA = {"properties": {"x": {"type": "string", "maxLength": 3}}, "required": ["x"]}
OLD_FORM = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}


def tag_format(**fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": fields}


def tag_grammar(tag: Any) -> Any:
    return make_grammar("xgrammar", K.STRUCTURAL_TAG, json.dumps(tag))


@pytest.mark.parametrize(
    ("fields", "texts", "others"),
    [
        ({"type": "const_string", "value": "hi"}, ["hi"], ["h", "hi!"]),
        ({"type": "regex", "pattern": "^b{1,2}|b|c$"}, ["b", "bb", "c"], ["bbb", ""]),
        ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["b", "aab"], ["a"]),
        ({"type": "grammar", "grammar": 'root ::= "(" root? ")"'}, ["((()))"], ["(()"]),
        (
            OLD_FORM,
            ['Well: <f=a>{"x": "é"}</f> and <f=a>{"x":""}</f>.', "No tags at all, a < b"],
            ['<f=a>{"y": "é"}</f>', '<f=a>{"x": "long"}</f>', "<f=b>"],
        ),
        ({"type": "json_schema", "json_schema": {"enum": [1, "ße"]}}, ["1", '"ße"'], ["2"]),
        ({"type": "json_schema", "json_schema": {"pattern": "^x+$"}}, ['"xx"'], ['"y"', "1"]),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "optional", "content": {"type": "const_string", "value": "a"}},
                    {"type": "star", "content": {"type": "const_string", "value": "b"}},
                    {"type": "or", "elements": [{"type": "const_string", "value": "c"}]},
                ],
            },
            ["c", "abbc"],
            ["ab", "aac"],
        ),
        (
            {
                "type": "json_schema",
                "style": "qwen_xml",
                "json_schema": {"properties": {"n": {"type": "integer"}}, "required": ["n"]},
            },
            ["<parameter=n>3</parameter>"],
            ["<parameter=n>x</parameter>"],
        ),
    ],
)
def test_formats_hold(fields: dict[str, Any], texts: list[str], others: list[str]) -> None:
    grammar = tag_grammar(fields if "structures" in fields else tag_format(**fields))

    assert [text for text in texts if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ([], "must be an object"),
        ({}, "needs 'format'"),
        (tag_format(type="magic"), "no format is called 'magic'"),
        (tag_format(type="sequence"), "format/elements must be a list"),
        (tag_format(type="tag", begin="a", end="b"), "format/content must be an object"),
        (tag_format(type="regex", pattern="(?=a)"), "format/pattern: the group"),
        (tag_format(type="json_schema", json_schema={"not": {}}), "format/json_schema: #: the key"),
        (tag_format(type="json_schema", json_schema={}, any_order=True), "'any_order' cannot"),
        (
            tag_format(type="json_schema", json_schema={"pattern": "a"}, style="qwen_xml"),
            "cannot be enforced in the style",
        ),
        (tag_format(type="repeat", min=1, max=10**6, content={}), "format/max must be"),
        (tag_format(type="grammar", grammar='root ::= "a"{99999}'), "it repeats 99999 times"),
        ({"structures": 3, "triggers": []}, "must be lists"),
        ({"structures": [{"begin": "a"}], "triggers": []}, "structures/0 must be an object"),
    ],
)
def test_what_cannot_be_held_to_is_refused(tag: Any, reason: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        tag_grammar(tag)

    assert reason in str(caught.value)


def test_xgrammars_own_refusals_say_why_and_not_where() -> None:
    with pytest.raises(ConstraintError) as caught:
        make_grammar("xgrammar", K.EBNF, 'root ::= "a')

    assert "line 1" in str(caught.value)
    assert ".cc" not in str(caught.value)


def test_any_json_object_is_an_object() -> None:
    grammar = make_grammar("xgrammar", K.JSON_OBJECT, "")

    assert accepts(grammar, '{"a": [1, {"b": null}], "c": {}}')
    assert not accepts(grammar, "[1]")
    for text in walks(grammar, 20):
        assert isinstance(json.loads(text), dict)
