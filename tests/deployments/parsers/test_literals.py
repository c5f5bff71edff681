"""Values written as text, and what they are in JSON."""

from __future__ import annotations

import ast
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.deployments.parsers.literals import argument_json, read_literal, to_json, types_of

EVERY = types_of(None, {})
literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(value=literals.filter(lambda value: "inf" not in repr(value)))
def test_literals_mean_what_python_says(value: Any) -> None:
    assert read_literal(repr(value)) == ast.literal_eval(repr(value))


@settings(deadline=None)
@given(text=st.text(alphabet="[](){},:'\"\\x1-. \nTrueNone", max_size=30))
def test_what_is_no_literal_is_refused_and_nothing_else_happens(text: str) -> None:
    read = to_json(text)
    with contextlib.suppress(ValueError):
        read = to_json(read_literal(text))

    json.loads(read)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 10_000, "[1,,2]", "{1}", "{'a'}", "a b", ""])
def test_what_cannot_be_read_stays_text(text: str) -> None:
    assert argument_json(text, EVERY) == to_json(text)


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("1", {"integer"}, "1"),
        ("1", {"string"}, '"1"'),
        ("1", {"string", "null"}, '"1"'),
        ("null", {"string", "null"}, "null"),
        ("1", {"string", "number"}, "1"),
        ("1.50", {"number"}, "1.50"),
        ("True", {"boolean"}, "true"),
        ("yes", {"boolean"}, '"yes"'),
        ("NaN", {"number"}, '"NaN"'),
        ("1e999", {"string", "array"}, '"1e999"'),
        (' {"a":  1} ', {"object"}, '{"a":  1}'),
        ("['\\ud83d\\ude00']", {"array"}, '["\\ud83d\\ude00"]'),
    ],
)
def test_an_argument_has_a_type_that_its_schema_allows(
    text: str, types: set[str], expected: str
) -> None:
    assert argument_json(text, frozenset(types)) == expected


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"const": None}, {"null"}),
        ({"$ref": "#/$defs/a~1b"}, {"integer"}),
        ({"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}]}, {"integer", "null"}),
        ({"$ref": "#/$defs/loop"}, EVERY),
        ({"$ref": "#/nowhere"}, EVERY),
        ({}, EVERY),
        (True, EVERY),
    ],
)
def test_a_schema_tells_the_types_it_allows(schema: Any, expected: set[str]) -> None:
    root = {"$defs": {"a/b": {"type": "integer"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}}

    assert types_of(schema, root) == expected
