"""200 JSON schemas of growing difficulty, the same in each run: data for end-to-end tests.

Every one is a JSON schema that some client could send; all have finite values that a small model
gets to the end of. A backend may refuse a schema; what it takes it must hold to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

_WORDS = ("name", "größe", "價格", "is_open", "item-id", "Ключ", "a b", 'say "hi"', "emoji😀", "x")


def _object(properties: Schema, *, required: list[str] | None = None, **more: Any) -> Schema:
    names = list(properties) if required is None else required
    closed = {"additionalProperties": False}
    return {"type": "object", "properties": properties, "required": names, **closed, **more}


def _scalars(n: int) -> Schema:
    kinds: list[Schema] = [
        {"type": "string", "maxLength": 3 + n},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": 0, "maximum": 9 + n},
        {"enum": ["red", "green", "blue", n]},
        {"const": {"version": n, "tags": ["a", "b"]}},
    ]
    return _object({"value": kinds[n % len(kinds)]})


def _enums(n: int) -> Schema:
    values = [f"option {index}" for index in range(2 + n)]
    mixed: list[Any] = [*values, n, None, True, 1.5, {"k": [n]}, 'quote " and \\ slash', "日本"]
    kinds = [{"type": "string", "enum": values}, {"enum": mixed}, {"const": "only"}]
    return _object({_WORDS[n % len(_WORDS)]: kinds[n % len(kinds)]})


def _numbers(n: int) -> Schema:
    kinds: list[Schema] = [
        {"type": "integer", "minimum": -n, "maximum": 10 * n + 1},
        {"type": "integer", "exclusiveMinimum": n, "exclusiveMaximum": n + 3},
        {"type": "integer", "minimum": 90 + n, "maximum": 1010 + n},
        {"type": "number", "minimum": -1.5, "maximum": 2.25 + n},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "integer", "minimum": -1000 - n, "maximum": -1},
    ]
    return _object({"number": kinds[n % len(kinds)], "unit": {"enum": ["m", "s", "kg"]}})


def _patterns(n: int) -> Schema:
    patterns = (
        "^[A-Z]{2,3}-[0-9]{1,4}$",
        "^(?:foo|ba[rz]){1,2}$",
        r"^\d{3}-\d{4}$",
        r"^[a-z]+(?:\.[a-z]{1,4}){0,2}$",
        r"^[^\s@]{1,5}@[a-z]{1,8}\.(com|org)$",
        "^[äöü]{1,3}$",
        r"^\+?[0-9 ]{3,8}$",
        "^#(?:[0-9a-fA-F]{3}){1,2}$",
    )
    pattern = patterns[n % len(patterns)]
    return _object({f"field_{n}": {"type": "string", "pattern": pattern}})


def _formats(n: int) -> Schema:
    formats = ("date", "time", "date-time", "uuid", "ipv4", "email", "duration", "hostname")
    return _object({"value": {"type": "string", "format": formats[n % len(formats)]}})


def _arrays(n: int) -> Schema:
    item: Schema = ({"type": "boolean"}, {"enum": [1, 2, 3]}, {"type": "string", "maxLength": 4})[
        n % 3
    ]
    low, high = n % 4, n % 4 + 1 + n % 2
    kinds: list[Schema] = [
        {"type": "array", "items": item, "minItems": low, "maxItems": high},
        {"type": "array", "prefixItems": [item, {"type": "null"}], "items": False},
        {
            "type": "array",
            "prefixItems": [{"const": n}, item],
            "items": item,
            "minItems": 2,
            "maxItems": 4,
        },
        {"type": "array", "items": {"type": "array", "items": item, "maxItems": 2}, "maxItems": 2},
    ]
    return _object({"list": kinds[n % len(kinds)]})


def _optional(n: int) -> Schema:
    properties = {word: {"enum": [index, "x"]} for index, word in enumerate(_WORDS[: 2 + n % 6])}
    required = [word for index, word in enumerate(properties) if index % (2 + n % 3) == 1]
    schema = _object(properties, required=required)
    if n % 4 == 0:
        schema["minProperties"] = len(required) + 1
    if n % 4 == 1:
        schema["maxProperties"] = len(required) + 1
    return schema


def _unions(n: int) -> Schema:
    branches: list[Schema] = [
        {"type": "null"},
        {"type": "integer", "minimum": n, "maximum": n + 5},
        {"type": "string", "maxLength": 3},
        _object({"kind": {"const": "cat"}, "lives": {"enum": [7, 9]}}),
        _object({"kind": {"const": "dog"}, "good": {"type": "boolean"}}),
    ]
    keyword = ("anyOf", "oneOf")[n % 2]
    return _object({"value": {keyword: branches[n % 3 :]}, "many": {"type": ["boolean", "null"]}})


def _references(n: int) -> Schema:
    definitions = {
        "Point": _object({"x": {"$ref": "#/$defs/Axis"}, "y": {"$ref": "#/$defs/Axis"}}),
        "Axis": {"type": "integer", "minimum": 0, "maximum": 10 + n},
        "tricky/na~me %": {"enum": ["a/b", "c~d"]},
    }
    return _object(
        {
            "from": {"$ref": "#/$defs/Point", "description": "where it begins"},
            "to": {"allOf": [{"$ref": "#/$defs/Point"}], "title": "where it ends"},
            "label": {"$ref": "#/$defs/tricky~1na~0me%20%25"},
            "path": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "maxItems": n % 3},
        },
    ) | {"$defs": definitions, "$schema": "https://json-schema.org/draft/2020-12/schema"}


def _recursive(n: int) -> Schema:
    node = _object(
        {
            "id": {"type": "integer", "minimum": 0, "maximum": 99},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Node"}]},
        }
    )
    tree = _object(
        {
            "leaf": {"type": "boolean"},
            "children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 1 + n % 2},
        }
    )
    expression = {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": 9},
            _object({"not_": {"$ref": "#/$defs/Expression"}}),
        ]
    }
    name, schema = (("Node", node), ("Tree", tree), ("Expression", expression))[n % 3]
    return {"$ref": f"#/$defs/{name}", "$defs": {name: schema}}


def _nested(n: int) -> Schema:
    schema: Schema = {"type": "string", "maxLength": 3}
    for level in range(1 + n % 6):
        word = _WORDS[(n + level) % len(_WORDS)]
        if level % 3 == 2:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}
        else:
            schema = _object({word: schema, "level": {"const": level}})
    return schema if schema["type"] == "object" else _object({"top": schema})


def _pydantic(n: int) -> Schema:
    """As `model_json_schema` of a model with optional fields, an enum and a nested model."""
    level = {"enum": ["low", "high"], "title": "Level", "type": "string"}
    owner = {
        "properties": {
            "name": {"maxLength": 8, "minLength": 1, "title": "Name", "type": "string"},
            "age": {
                "anyOf": [{"maximum": 120, "minimum": 0, "type": "integer"}, {"type": "null"}],
                "default": None,
                "title": "Age",
            },
        },
        "required": ["name"],
        "title": "Owner",
        "type": "object",
    }
    return {
        "$defs": {"Level": level, "Owner": owner},
        "description": f"Model {n}",
        "properties": {
            "owner": {"$ref": "#/$defs/Owner"},
            "level": {"$ref": "#/$defs/Level", "default": "low"},
            "tags": {
                "default": [],
                "items": {"enum": ["new", "old"], "type": "string"},
                "maxItems": n % 4,
                "title": "Tags",
                "type": "array",
            },
            "when": {"format": "date", "title": "When", "type": "string"},
        },
        "required": ["owner", "level", "when"],
        "title": "Order",
        "type": "object",
    }


def _names(n: int) -> Schema:
    """Objects whose property names are free, or told by a pattern."""
    value: Schema = {"type": "integer", "minimum": 0, "maximum": n}
    kinds: list[Schema] = [
        {"type": "object", "additionalProperties": value, "maxProperties": 1 + n % 2},
        {
            "type": "object",
            "patternProperties": {"^[a-z]{1,4}$": value},
            "additionalProperties": False,
            "maxProperties": 2,
        },
        _object({"fixed": value}, maxProperties=2) | {"additionalProperties": {"type": "boolean"}},
    ]
    return _object({"map": kinds[n % len(kinds)]})


_KINDS: tuple[Callable[[int], Schema], ...] = (
    _scalars,
    _enums,
    _numbers,
    _patterns,
    _formats,
    _arrays,
    _optional,
    _unions,
    _references,
    _recursive,
    _nested,
    _pydantic,
    _names,
)
NUM_SCHEMAS = 200


def _all() -> Iterator[Schema]:
    """One of each kind, then the next of each kind."""
    for n in itertools.count():
        for kind in _KINDS:
            yield kind(n)


SCHEMAS: list[dict[str, Any]] = list(itertools.islice(_all(), NUM_SCHEMAS))
