"""Shapes of responses, written in short, and the JSON schemas that they stand for.

str, int, float, bool, None    a value of this type; `object` = any value, `dict` = any object
"list"                         this text
[shape]                        an array
{"a": shape, "b?": shape}      an object; `?` = may be absent; others may be present
(shape, None)                  one of these
Answer                         a named schema
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

REFERENCE = "#/components/schemas/{model}"
_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A response that has a name in the description."""

    name: str
    shape: Any


def schema_of(shape: Any) -> dict[str, Any]:
    """Return the JSON schema of a shape; answers in it are references."""
    if isinstance(shape, Answer):
        return {"$ref": REFERENCE.format(model=shape.name)}
    if shape is object:
        return {}
    if shape is None:
        return {"type": "null"}
    if isinstance(shape, str):
        return {"type": "string", "const": shape}
    if isinstance(shape, tuple):
        return {"anyOf": [schema_of(one) for one in shape]}
    if isinstance(shape, list):
        return {"type": "array", "items": schema_of(shape[0])}
    if isinstance(shape, dict):
        required = [name for name in shape if not name.endswith("?")]
        properties = {name.rstrip("?"): schema_of(part) for name, part in shape.items()}
        return {"type": "object", "properties": properties, "required": required}
    return {"type": _SIMPLE[shape]}


def answers_in(shape: Any) -> Iterator[Answer]:
    """Yield all answers within a shape, also those within answers."""
    if isinstance(shape, Answer):
        yield shape
        yield from answers_in(shape.shape)
    elif isinstance(shape, list | tuple):
        for part in shape:
            yield from answers_in(part)
    elif isinstance(shape, dict):
        yield from answers_in(list(shape.values()))
