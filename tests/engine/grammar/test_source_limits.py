"""What is looked at before anything is compiled: each limit, and one beyond it."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

from remora.configs.sections.grammar import GrammarSection
from remora.engine.grammar import source_limits
from remora.engine.grammar.constraint import Constraint, ConstraintError, ConstraintKind
from remora.engine.grammar.json_schema import schema as schema_module
from remora.engine.grammar.prepare import Source, prepare

K = ConstraintKind
XGRAMMAR = GrammarSection()
OUTLINES = GrammarSection(backend="outlines")


def check(kind: ConstraintKind, source: Any, section: GrammarSection = XGRAMMAR) -> Source:
    text = source if isinstance(source, str) else json.dumps(source)
    return prepare(Constraint(kind=kind, source=text), section)


def nested(depth: int) -> dict[str, Any]:
    """A schema of `depth` objects and lists one in the other."""
    schema: dict[str, Any] = {}
    while depth > 1:
        schema, depth = {"items": schema}, depth - 1
    return schema


def padded(size: int) -> str:
    text = '{"type": "string", "title": ""}'
    return text.replace('""', f'"{"x" * (size - len(text))}"')


@pytest.mark.parametrize(
    ("kind", "fits", "beyond", "reason"),
    [
        (K.JSON_SCHEMA, padded(65_536), padded(65_537), "65537 bytes"),
        (K.JSON_SCHEMA, nested(32), nested(33), "deeper than 32"),
        (K.JSON_SCHEMA, {"examples": [[]] * 1998}, {"examples": [[]] * 1999}, "more than 2000"),
        (K.JSON_SCHEMA, {"title": int("9" * 64)}, {"title": int("9" * 65)}, "more than 64 digits"),
        (K.REGEX, "a" * 2048, "a" * 2049, "2049 bytes"),
        (K.REGEX, "(a{100}){100}", "(a{100}){101}", "multiply to 10100"),
        (K.CHOICE, [f"c{i}" for i in range(1024)], [f"c{i}" for i in range(1025)], "1025 choices"),
        (K.EBNF, f'root ::= "{"a" * 65_525}"', f'root ::= "{"a" * 65_526}"', "65537 bytes"),
        (K.EBNF, 'root ::= "a"{1,10000}', 'root ::= "a"{1,10001}', "repeats 10001"),
    ],
)
def test_a_constraint_is_taken_up_to_its_limit(
    kind: ConstraintKind, fits: Any, beyond: Any, reason: str
) -> None:
    assert check(kind, fits)

    with pytest.raises(ConstraintError, match=reason):
        check(kind, beyond)


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        (K.JSON_SCHEMA, "", "not JSON"),
        (K.JSON_SCHEMA, "{", "not JSON"),
        (K.JSON_SCHEMA, '{"minimum": NaN}', "not JSON: NaN"),
        (K.JSON_SCHEMA, '{"minimum": Infinity}', "not JSON: Infinity"),
        (K.JSON_SCHEMA, '{"const": "\\ud800"}', "surrogate"),
        (K.JSON_SCHEMA, '{"properties": {"\\udc00": {}}}', "surrogate"),
        (K.JSON_SCHEMA, "[" * 30_000 + "]" * 30_000, "deeper than 32"),
        (K.REGEX, "\ud800", "surrogate"),
        (K.JSON_SCHEMA, '{"properties": {"a": false}, "required": ["a"]}', "required 'a'"),
        (K.STRUCTURAL_TAG, '{"format": {"type": []}}', "no format is called"),
        (K.CHOICE, "[]", "0 choices"),
        (K.CHOICE, '["a", ""]', "at least one character"),
        (K.CHOICE, '["a", 1]', "list of texts"),
        (K.CHOICE, '"a"', "list of texts"),
    ],
)
def test_malformed_sources_are_refused(kind: ConstraintKind, source: str, reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason):
        check(kind, source)


# Schemas within all limits; what was written out naively took from 10 s to days.
ALIKE = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
SERIES = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
CASES = [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(480)]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/d0", "$defs": ALIKE | {"d40": {"type": "string"}}},
        {"$ref": "#/$defs/d0", "$defs": SERIES | {"d40": {"type": "string"}}},
        {"allOf": [{"enum": [*range(4000)]}, {"enum": [*range(-4000, 1)]}]},
        {"enum": [*range(4500)], "anyOf": [{"enum": [i]} for i in range(900)]},
        {"oneOf": [{"const": i} for i in range(1900)]},
        {"oneOf": [{"anyOf": [{"const": i}] * 40} for i in range(40)]},
        {"oneOf": CASES},
        {"type": "object", "required": [f"a{i}" for i in range(6000)]},
    ],
)
def test_no_schema_is_read_for_long(schema: Any) -> None:
    """It is read where the engine lives, and holds the interpreter."""
    with suppress(ConstraintError):
        check(K.JSON_SCHEMA, schema)


def test_one_of_many_constants_is_taken() -> None:
    assert check(K.JSON_SCHEMA, {"oneOf": [{"const": i} for i in range(1900)]})
    with pytest.raises(ConstraintError, match="oneOf"):
        check(K.JSON_SCHEMA, {"oneOf": [{"const": 1}, {"enum": [2, 3]}, {"enum": [3]}]})


def test_the_time_to_read_a_schema_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_module, "MAX_READ_S", -1.0)

    with pytest.raises(ConstraintError, match="takes too long"):
        check(K.JSON_SCHEMA, {"type": "string"})


def test_a_schema_that_is_too_deep_for_the_backend_is_refused() -> None:
    with pytest.raises(ConstraintError, match="nests too deep"):
        check(K.JSON_SCHEMA, {"properties": {f"p{i}": {"const": 1} for i in range(1900)}}, OUTLINES)


def test_equal_constraints_give_equal_sources() -> None:
    assert check(K.JSON_SCHEMA, '{"type":"string","title":"a"}') == check(
        K.JSON_SCHEMA, '{ "title" : "b", "type": "string" }'
    )
    assert check(K.CHOICE, ["a", "b", "a"]) == check(K.CHOICE, ["a", "b"])
    assert check(K.JSON_OBJECT, "") == check(K.JSON_SCHEMA, {"type": "object"})


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (K.JSON_OBJECT, ""),
        (K.EBNF, 'root ::= "a"'),
        (K.STRUCTURAL_TAG, {"format": {"type": "any_text"}}),
        (K.JSON_SCHEMA, {"type": "object"}),
        (K.JSON_SCHEMA, {"$ref": "#/$defs/A", "$defs": {"A": {"items": {"$ref": "#/$defs/A"}}}}),
        (K.JSON_SCHEMA, {"type": "number", "minimum": 0}),
    ],
)
def test_outlines_names_the_backend_that_can(kind: ConstraintKind, source: Any) -> None:
    with pytest.raises(ConstraintError, match="xgrammar"):
        check(kind, source, OUTLINES)


@pytest.mark.observes("grammar.json_whitespace_pattern")
def test_whitespace_of_outlines_is_the_operators() -> None:
    section = GrammarSection(backend="outlines", json_whitespace_pattern="[ ]?")

    text = check(K.JSON_SCHEMA, {"properties": {"a": {"type": "null"}}}, section).text

    assert "\\u0020{0,1}" in text
    assert "\\u000a" not in text


def test_sources_of_any_size_are_measured_before_they_are_parsed() -> None:
    with pytest.raises(ConstraintError, match="at most 65536"):
        source_limits.check_size(Constraint(kind=K.JSON_SCHEMA, source="[" * 10_000_000), XGRAMMAR)
