"""The types of JSON schema that have keywords of their own, in the plain form of `schema.py`."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Protocol

from remora.engine.grammar.constraint import ConstraintError
from remora.engine.grammar.json_schema.formats import PATTERNS, UNENFORCEABLE
from remora.engine.grammar.json_schema.merge import Schema
from remora.engine.grammar.regex import lengths, render, within_json
from remora.engine.grammar.regex_reader import read_pattern

MAX_BOUND = 2**53
MAX_COUNT = 100_000
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


class Places(Protocol):
    """Rewrites the schemas within a schema."""

    def schema(self, node: Any, path: str) -> Schema:
        """Rewrite one place."""

    def any(self) -> Schema:
        """Return the plain form of any JSON value."""


def plain_string(flat: Schema, path: str) -> Schema:
    """Rewrite a string: lengths, or one pattern."""
    low, high = _counts(flat, "minLength", "maxLength", path)
    form = flat.get("format")
    if form in UNENFORCEABLE:
        raise ConstraintError(f"{path}: the keyword 'format' cannot be enforced for {form!r}")
    patterns = [p for p in (flat.get("pattern"), PATTERNS.get(str(form))) if p is not None]
    if len(patterns) > 1:
        raise ConstraintError(
            f"{path}: the keyword 'pattern' cannot be enforced together with 'format'"
        )
    if not patterns:
        return {"type": "string", **low, **high}
    pattern, shortest, longest = _pattern(patterns[0], f"{path}/pattern")
    is_short = not high or (longest is not None and longest <= high["maxLength"])
    if shortest < low.get("minLength", 0) or not is_short:
        keyword = "maxLength" if high else "minLength"
        raise ConstraintError(
            f"{path}: the keyword {keyword!r} cannot be enforced together with a pattern or format"
            " that does not keep to it itself; write the lengths into the pattern"
        )
    return {"type": "string", "pattern": pattern}


def _pattern(pattern: str, path: str) -> tuple[str, int, int | None]:
    """Return a pattern in the form for compilers, and the lengths of its matches."""
    node = within_json(read_pattern(pattern, path))
    if node is None:
        raise ConstraintError(
            f"{path}: it matches only texts with quotes, backslashes or control characters, which"
            " cannot be enforced within JSON"
        )
    return render(node), *lengths(node)


def plain_number(name: str, flat: Schema, path: str) -> Schema:
    """Rewrite a number: at most one lower and one upper bound; whole ones for integers."""
    bounds = {}
    for keyword in (*_LOW, *_HIGH):
        if keyword in flat:
            value = flat[keyword]
            if abs(value) > MAX_BOUND:
                raise ConstraintError(f"{path}: {keyword!r} cannot be enforced beyond 2**53")
            bounds[keyword] = value
    if name == "integer":
        bounds = _whole(bounds)
    for names, tighter in ((_LOW, max), (_HIGH, min)):
        if all(keyword in bounds for keyword in names):
            inclusive, exclusive = (bounds[keyword] for keyword in names)
            del bounds[names[0] if tighter(inclusive, exclusive) == exclusive else names[1]]
    low: Any = bounds.get("minimum", bounds.get("exclusiveMinimum", -math.inf))
    high: Any = bounds.get("maximum", bounds.get("exclusiveMaximum", math.inf))
    if low > high or (low == high and len(bounds.keys() & {"minimum", "maximum"}) < 2):
        raise ConstraintError(f"{path}: no number lies within the bounds")
    return {"type": name, **bounds}


def _whole(bounds: dict[str, Any]) -> dict[str, Any]:
    """Return the same bounds for integers as whole numbers, both inclusive."""
    lows = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    lows += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
    highs = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    highs += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
    return ({"minimum": max(lows)} if lows else {}) | ({"maximum": min(highs)} if highs else {})


def plain_array(places: Places, flat: Schema, path: str) -> Schema:
    """Rewrite an array. A list of items by position without further keywords allows no more."""
    counts = _counts(flat, "minItems", "maxItems", path)
    low, high = counts[0].get("minItems", 0), counts[1].get("maxItems")
    items, prefix = flat.get("items"), flat.get("prefixItems", [])
    if isinstance(items, list):  # spelling of drafts before 2020-12
        prefix, items = items, flat.get("additionalItems")
    if items is None and (not prefix or low > len(prefix)):
        items = True
    if items in (None, False):
        if low > len(prefix):
            raise ConstraintError(f"{path}: 'minItems' is {low}, but only {len(prefix)} may follow")
        high = len(prefix) if high is None else min(high, len(prefix))
    if high == 0:
        return {"type": "array", "items": places.any(), "maxItems": 0}
    plain: Schema = {"type": "array", **counts[0]}
    if prefix:
        plain["prefixItems"] = [
            places.schema(item, f"{path}/prefixItems/{index}")
            for index, item in enumerate(prefix[:high])
        ]
    if items in (None, False) or (high is not None and high <= len(prefix)):
        return {**plain, "items": False}
    more = {} if high is None else {"maxItems": high}
    return {**plain, "items": places.schema(items, f"{path}/items"), **more}


def plain_object(places: Places, flat: Schema, path: str) -> Schema:
    """Rewrite an object: named properties and others, or names by pattern."""
    properties = dict(flat.get("properties", {}))
    patterns = flat.get("patternProperties", {})
    required = dict.fromkeys(flat.get("required", ()))
    is_named = bool(properties or patterns or required)
    others = flat.get("additionalProperties", not is_named or None)
    for name in required:
        if name not in properties:
            if others is False or patterns:
                raise ConstraintError(f"{path}: the required {name!r} is not among the properties")
            properties[name] = True if others is None else others
        elif properties[name] is False:
            raise ConstraintError(f"{path}: the required {name!r} allows no value at all")
    low, high = _property_counts(flat, len(properties), required, others, path)
    if patterns:
        return {**_named_by_pattern(places, properties, patterns, others, path), **low, **high}
    plain: Schema = {"type": "object"}
    if properties:
        plain["properties"] = {
            name: places.schema(node, f"{path}/properties/{name}")
            for name, node in properties.items()
            if node is not False
        }
        plain["required"] = [name for name in properties if name in required]
        if len(plain["properties"]) < len(properties) and others not in (None, False):
            raise ConstraintError(
                f"{path}: a property that is false needs additionalProperties false"
            )
    closed = others is None or others is False
    plain["additionalProperties"] = (
        False if closed else places.schema(others, f"{path}/additionalProperties")
    )
    return {**plain, **low, **high}


def _named_by_pattern(
    places: Places, properties: Schema, patterns: Schema, others: Any, path: str
) -> Schema:
    if len(patterns) > 1 or properties or others not in (None, False):
        raise ConstraintError(
            f"{path}: the keyword 'patternProperties' can be enforced only with one pattern, and"
            " without 'properties' and 'additionalProperties'"
        )
    ((pattern, node),) = patterns.items()
    place = f"{path}/patternProperties"
    return {
        "type": "object",
        "patternProperties": {_pattern(pattern, place)[0]: places.schema(node, place)},
        "additionalProperties": False,
    }


def _property_counts(
    flat: Schema, num_named: int, required: Collection[str], others: Any, path: str
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bounds on the number of properties, if they restrict more than the names."""
    low, high = _counts(flat, "minProperties", "maxProperties", path)
    is_open = others not in (None, False) or "patternProperties" in flat
    fewest = low.get("minProperties", 0)
    if fewest <= len(required):
        low = {}
    elif is_open and fewest > 1:
        raise ConstraintError(
            f"{path}: the keyword 'minProperties' cannot be enforced where names are free: the same"
            " name could be counted twice"
        )
    elif not is_open and fewest > num_named:
        raise ConstraintError(f"{path}: 'minProperties' is more than there are properties")
    if high.get("maxProperties", num_named) < len(required):
        raise ConstraintError(f"{path}: 'maxProperties' is less than the required properties")
    return low, high


def _counts(flat: Schema, low: str, high: str, path: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the two bounds of a count, if they have an effect."""
    bounds: dict[str, int] = {}
    for keyword in (low, high):
        if keyword in flat:
            value = flat[keyword]
            if not 0 <= value <= MAX_COUNT or value != int(value):
                raise ConstraintError(
                    f"{path}: {keyword!r} must be an integer from 0 to {MAX_COUNT}"
                )
            bounds[keyword] = int(value)
    if bounds.get(low, 0) > bounds.get(high, MAX_COUNT):
        raise ConstraintError(f"{path}: {low!r} is greater than {high!r}")
    at_least = {low: bounds[low]} if bounds.get(low) else {}
    return at_least, {high: bounds[high]} if high in bounds else {}
