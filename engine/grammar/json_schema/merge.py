"""Keywords of JSON schema that have an effect, and merging two schemas into one.

Keywords in no table (title, default, custom ones) are annotations and left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from remora.engine.grammar.constraint import ConstraintError

Schema = dict[str, Any]

KEYWORDS_OF: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "array": frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems"}),
    "object": frozenset(
        {
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "minProperties",
            "maxProperties",
        }
    ),
}
_GENERAL = frozenset({"$ref", "type", "const", "enum", "anyOf", "oneOf", "allOf"})

# Keywords that no backend can enforce, and the value with which each has no effect.
_REFUSED: Mapping[str, Any] = {
    "not": None,
    "if": None,
    "multipleOf": None,
    "uniqueItems": False,
    "contains": None,
    "propertyNames": {},
    "dependencies": {},
    "dependentRequired": {},
    "dependentSchemas": {},
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "$dynamicRef": None,
    "$recursiveRef": None,
    "extends": None,
    "disallow": None,
    "divisibleBy": None,
}
_SHAPE_NAMES = {list: "a list", dict: "an object", str: "a text", float: "a number"}
_SHAPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("required", "enum", "allOf", "anyOf", "oneOf", "prefixItems"), (list,)),
    **dict.fromkeys(("properties", "patternProperties"), (dict,)),
    **dict.fromkeys(("pattern", "format", "$ref"), (str,)),
    **dict.fromkeys(("type",), (str, list)),
    **dict.fromkeys(KEYWORDS_OF["number"], (int, float)),
    **dict.fromkeys(
        (f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties")),
        (int, float),
    ),
}
_KEPT = frozenset().union(_GENERAL, *KEYWORDS_OF.values())


def same(first: Any, second: Any) -> bool:
    """Whether two JSON values are identical (1, 1.0 and true are three different values)."""
    return spelled(first) == spelled(second)


def spelled(value: Any) -> str:
    """Return a text that is equal for identical JSON values only."""
    return json.dumps(value, sort_keys=True)


def keywords(node: Any, path: str) -> Schema:
    """Return the keywords of a schema that have an effect. Raises ConstraintError."""
    if node is True:
        return {}
    if node is False:
        raise ConstraintError(f"{path}: the schema false allows no value at all")
    if not isinstance(node, dict):
        raise ConstraintError(f"{path}: a schema must be an object, true or false")
    for keyword in _REFUSED:
        if keyword in node and not same(node[keyword], _REFUSED[keyword]):
            raise ConstraintError(f"{path}: the keyword {keyword!r} cannot be enforced")
    kept = {keyword: value for keyword, value in node.items() if keyword in _KEPT}
    for keyword, value in kept.items():
        shape = _SHAPES.get(keyword, (object,))
        is_flag = isinstance(value, bool) and keyword in _SHAPES
        if is_flag or not isinstance(value, shape):
            names = " or ".join(_SHAPE_NAMES[kind] for kind in shape if kind in _SHAPE_NAMES)
            raise ConstraintError(f"{path}: {keyword!r} must be {names}")
    for keyword in ("required", "type"):
        if any(not isinstance(name, str) for name in kept.get(keyword, ())):
            raise ConstraintError(f"{path}: {keyword!r} must be a list of names")
    return kept


def merge(first: Schema, second: Schema, path: str) -> Schema:
    """Return the conjunction of two schemas.

    Raises ConstraintError if it takes more than combining their keywords.
    """
    _check_closed(first, second, path)
    merged = dict(first)
    for keyword, value in second.items():
        if keyword not in merged or same(merged[keyword], value):
            merged[keyword] = value
        elif keyword in _BOTH:
            merged[keyword] = _BOTH[keyword](merged[keyword], value, path)
        else:
            raise ConstraintError(f"{path}: two values of {keyword!r} that hold at the same time")
    return merged


def _check_closed(first: Schema, second: Schema, path: str) -> None:
    """Refuse a keyword about remaining items or properties whose meaning merging would change."""
    for rest, named in (
        ("additionalProperties", {"properties", "patternProperties"}),
        ("items", {"prefixItems"}),
    ):
        for one, other in ((first, second), (second, first)):
            about = named | {rest}
            if rest in one and about & other.keys() and not _agree(one, other, about):
                raise ConstraintError(
                    f"{path}: {rest!r} cannot be combined with another schema of the same object"
                    " or array"
                )


def _agree(first: Schema, second: Schema, about: set[str]) -> bool:
    return all(same(first.get(keyword), second.get(keyword)) for keyword in about)


def _union(first: Any, second: Any, path: str) -> list[Any]:
    return list(dict.fromkeys([*first, *second]))


def _common_values(first: Any, second: Any, path: str) -> list[Any]:
    known = set(map(spelled, second))
    return [value for value in first if spelled(value) in known]


def _common_types(first: Any, second: Any, path: str) -> list[str]:
    one, other = (value if isinstance(value, list) else [value] for value in (first, second))
    common = [name for name in one if name in other or (name == "integer" and "number" in other)]
    common += [name for name in other if name == "integer" and "number" in one]
    if not common:
        raise ConstraintError(f"{path}: no value is of both types {first!r} and {second!r}")
    return list(dict.fromkeys(common))


def _properties(first: Any, second: Any, path: str) -> Schema:
    for name in first.keys() & second.keys():
        if not same(first[name], second[name]):
            raise ConstraintError(f"{path}: two schemas of the property {name!r}")
    return {**first, **second}


_BOTH: Mapping[str, Callable[[Any, Any, str], Any]] = {
    "required": _union,
    "enum": _common_values,
    "type": _common_types,
    "properties": _properties,
    **dict.fromkeys(
        ("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"),
        lambda first, second, path: max(first, second),
    ),
    **dict.fromkeys(
        ("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"),
        lambda first, second, path: min(first, second),
    ),
}
