"""Whether every value of a plain schema can be completed.

A schema whose every instance contains another instance of itself would never end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.engine.grammar.constraint import ConstraintError
from remora.engine.grammar.json_schema.merge import Schema


def check_ends(root: Schema, defs: Mapping[str, Schema]) -> None:
    """Raise ConstraintError for definitions without a finite instance or with direct
    self-reference.

    A direct self-reference is a grammar that recurses without output.
    """
    everything = {"": root, **defs}
    ending: set[str] = set()
    while True:
        more = {
            name
            for name, schema in everything.items()
            if name not in ending and _can_end(schema, ending)
        }
        if not more:
            break
        ending |= more
    if len(ending) < len(everything):
        raise ConstraintError("the schema refers to itself in a way that has no finite value")
    checked: set[str] = set()
    for schema in everything.values():
        _check_writes(schema, everything, (), checked)


def target(schema: Mapping[str, Any]) -> str:
    """Return the name of the definition that a plain reference points at."""
    return str(schema["$ref"]).rpartition("/")[2]


def _can_end(schema: Schema, ending: set[str]) -> bool:
    if "$ref" in schema:
        return target(schema) in ending
    if "anyOf" in schema:
        return any(_can_end(option, ending) for option in schema["anyOf"])
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", False)
        if schema.get("minProperties", 0) > len(properties) and isinstance(others, dict):
            return _can_end(others, ending)
        return all(_can_end(properties[name], ending) for name in schema.get("required", ()))
    if schema.get("type") == "array":
        prefix, fewest = schema.get("prefixItems", []), schema.get("minItems", 0)
        needs_more = fewest > len(prefix) and isinstance(schema.get("items"), dict)
        return all(_can_end(item, ending) for item in prefix[:fewest]) and (
            not needs_more or _can_end(schema["items"], ending)
        )
    return True


def _check_writes(
    schema: Schema, defs: Mapping[str, Schema], above: tuple[str, ...], checked: set[str]
) -> None:
    if "$ref" in schema:
        name = target(schema)
        if name in above:
            raise ConstraintError("the schema refers straight back to itself")
        if name not in checked:
            _check_writes(defs[name], defs, (*above, name), checked)
            checked.add(name)
    for option in schema.get("anyOf", ()):
        _check_writes(option, defs, above, checked)
