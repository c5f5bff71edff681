"""JSON schemas in the plain form: what is rewritten, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remora.engine.grammar.constraint import ConstraintError
from remora.engine.grammar.json_schema.schema import ANY, ANY_PLAIN, plain_schema

S: dict[str, Any] = {"type": "string"}
OBJECT: dict[str, Any] = {"type": "object"}


def closed(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return OBJECT | {
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def with_any(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"$defs": {"any": ANY_PLAIN}}


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        (True, with_any(ANY)),
        ({"title": "T", "x-own": 1, "default": 3}, with_any(ANY)),
        (S | {"description": "d", "examples": ["e"]}, S),
        ({"const": 3}, {"enum": [3]}),
        ({"type": "string", "enum": ["a", 1]}, {"enum": ["a"]}),
        ({"type": ["string", "null"]}, {"anyOf": [S, {"type": "null"}]}),
        ({"type": ["integer", "number"]}, {"type": "number"}),
        ({"properties": {"a": S}}, closed({"a": S}, [])),
        ({"minLength": 2}, S | {"minLength": 2}),
        (OBJECT, with_any(OBJECT | {"additionalProperties": ANY})),
        (OBJECT | {"properties": {"a": S}, "required": ["a"]}, closed({"a": S}, ["a"])),
        (
            OBJECT | {"properties": {"a": S}, "additionalProperties": S},
            OBJECT | {"properties": {"a": S}, "required": [], "additionalProperties": S},
        ),
        (
            OBJECT | {"properties": {"a": S}, "required": ["z"]},
            with_any(closed({"a": S, "z": ANY}, ["z"])),
        ),
        ({"allOf": [S]}, S),
        ({"allOf": [S, {"maxLength": 3}], "minLength": 1}, S | {"minLength": 1, "maxLength": 3}),
        ({"$ref": "#/$defs/A", "maxLength": 3, "$defs": {"A": S}}, S | {"maxLength": 3}),
        (
            {"anyOf": [{"$ref": "#/definitions/A"}, {"type": "null"}], "definitions": {"A": S}},
            {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}], "$defs": {"d0": S}},
        ),
        (
            OBJECT | {"properties": {"a": S}, "anyOf": [{"required": ["a"]}, {"maxProperties": 0}]},
            {"anyOf": [closed({"a": S}, ["a"]), closed({"a": S}, []) | {"maxProperties": 0}]},
        ),
        ({"type": "integer", "exclusiveMinimum": 2.5, "maximum": 9.5},
         {"type": "integer", "minimum": 3, "maximum": 9}),
        ({"type": "number", "minimum": 3, "exclusiveMinimum": 3},
         {"type": "number", "exclusiveMinimum": 3}),
        ({"type": "array", "items": [S], "additionalItems": False},
         {"type": "array", "prefixItems": [S], "items": False}),
        ({"type": "array", "items": S, "uniqueItems": False, "minItems": 2.0},
         {"type": "array", "items": S, "minItems": 2}),
        (S | {"pattern": "^[A-Z]{2}$", "maxLength": 2}, S | {"pattern": "[A-Z]{2}"}),
        (S | {"format": "int32-of-mine"}, S),
        (S | {"minimum": 3}, S),
        ({"oneOf": [S, {"type": "integer"}]}, {"anyOf": [S, {"type": "integer"}]}),
    ],
)  # fmt: skip
def test_a_schema_is_rewritten(schema: Any, plain: dict[str, Any]) -> None:
    assert plain_schema(schema) == plain


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        *(
            (OBJECT | {"properties": {"a": {keyword: value}}}, f"/a: the keyword '{keyword}'")
            for keyword, value in {
                "not": S,
                "if": S,
                "multipleOf": 2,
                "uniqueItems": True,
                "contains": S,
                "propertyNames": {"maxLength": 3},
                "dependentRequired": {"a": ["b"]},
                "dependentSchemas": {"a": S},
                "unevaluatedProperties": False,
                "$dynamicRef": "#x",
            }.items()
        ),
        (False, "#: the schema false"),
        (3, "#: a schema must be"),
        ({"type": "text"}, "#: 'type' must be one"),
        ({"type": []}, "#: 'type' must be one"),
        ({"enum": []}, "'enum' holds no value"),
        ({"type": "string", "enum": [1]}, "'enum' holds no value"),
        ({"enum": [2**53 + 1]}, "beyond 2"),
        ({"enum": ["a"], "maxLength": 1}, "'maxLength' cannot be enforced together with enum"),
        (S | {"minLength": 3, "maxLength": 2}, "'minLength' is greater"),
        (S | {"minLength": -1}, "'minLength' must be an integer"),
        (S | {"minLength": "1"}, "'minLength' must be a number"),
        (S | {"maxLength": True}, "'maxLength' must be a number"),
        (S | {"pattern": "(?=a)"}, "#/pattern: the group"),
        (S | {"pattern": 'a"b'}, "#/pattern: it matches only texts with quotes"),
        (S | {"pattern": "a+", "maxLength": 3}, "'maxLength' cannot be enforced together"),
        (S | {"pattern": "a+", "format": "date"}, "'pattern' cannot be enforced together"),
        (S | {"format": "idn-email"}, "'format' cannot be enforced"),
        ({"type": "integer", "minimum": 3.5, "maximum": 3.9}, "no number lies"),
        ({"type": "number", "exclusiveMinimum": 3, "maximum": 3}, "no number lies"),
        ({"type": "integer", "maximum": 2**60}, "'maximum' cannot be enforced beyond"),
        ({"type": "integer", "exclusiveMinimum": True}, "'exclusiveMinimum' must be a number"),
        ({"type": "array", "prefixItems": [S], "items": False, "minItems": 2}, "'minItems' is 2"),
        (OBJECT | {"required": "a"}, "'required' must be a list"),
        (OBJECT | {"required": [1]}, "'required' must be a list of names"),
        (closed({"a": S}, ["z"]), "the required 'z'"),
        (OBJECT | {"minProperties": 2}, "'minProperties' cannot be enforced where names are free"),
        (closed({"a": S}, []) | {"minProperties": 2}, "'minProperties' is more"),
        (closed({"a": S}, ["a"]) | {"maxProperties": 0}, "'maxProperties' is less"),
        (OBJECT | {"properties": {"a": S}, "patternProperties": {"b": S}}, "'patternProperties'"),
        (OBJECT | {"patternProperties": {"b": S, "c": S}}, "'patternProperties'"),
        ({"$ref": "https://example.org/schema"}, "only places within the schema"),
        ({"$ref": "other.json#/a"}, "only places within the schema"),
        ({"$ref": "#anchor"}, "only places within the schema"),
        ({"$ref": "#/$defs/missing"}, "points at nothing"),
        ({"$ref": "#"}, "no finite value"),
        ({"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"},
         "no finite value"),
        ({"anyOf": [{"$ref": "#"}, S]}, "straight back"),
        (OBJECT | {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no finite value"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no finite value"),
        ({"allOf": [{"$ref": "#"}], "type": "string"}, "refer to themselves"),
        (OBJECT | {"properties": {"a": {"$ref": "#", "type": "object"}}}, "nests too deep"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "'oneOf' can be enforced only"),
        ({"oneOf": [S | {"maxLength": 3}, S]}, "'oneOf' can be enforced only"),
        ({"anyOf": []}, "'anyOf' is empty"),
        ({"anyOf": S}, "'anyOf' must be a list"),
        ({"allOf": [S, {"type": "integer"}]}, "both types"),
        ({"allOf": [closed({"a": S}, []), OBJECT | {"properties": {"b": S}}]},
         "'additionalProperties' cannot be combined"),
        ({"allOf": [S | {"pattern": "a"}, {"pattern": "b"}]}, "two values of 'pattern'"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_to_is_refused(schema: Any, named: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        plain_schema(schema)

    assert named in str(caught.value)


def test_one_of_is_taken_where_a_constant_tells_the_branches_apart() -> None:
    cat = closed({"kind": {"const": "cat"}}, ["kind"])
    dog = closed({"kind": {"enum": ["dog", "puppy"]}}, ["kind"])
    schema = {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}, {"type": "null"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {"Cat": cat, "Dog": dog},
    }

    assert len(plain_schema(schema)["anyOf"]) == 3

    optional = {"oneOf": [cat | {"required": []}, dog]}
    with pytest.raises(ConstraintError, match="oneOf"):
        plain_schema(optional)


def test_a_schema_that_multiplies_when_written_out_is_refused() -> None:
    schema: dict[str, Any] = {"$defs": {"d0": S}}
    for level in range(20):
        twice = [{"$ref": f"#/$defs/d{level}", "type": ["string", "array"]}] * 2
        schema["$defs"][f"d{level + 1}"] = {"type": ["string", "array"], "anyOf": twice}
    schema["$ref"] = "#/$defs/d20"
    schema["type"] = ["string", "array"]

    with pytest.raises(ConstraintError, match=r"too many parts|themselves|nests|too long"):
        plain_schema(schema)


def test_order_of_properties_is_kept() -> None:
    properties = dict.fromkeys(("z", "a", "m"), S)

    assert list(plain_schema(OBJECT | {"properties": properties})["properties"]) == ["z", "a", "m"]
    assert json.dumps(plain_schema({"required": [], "properties": properties})) == json.dumps(
        plain_schema({"properties": properties, "required": []})
    )
