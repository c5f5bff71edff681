"""A plain schema (see `schema.py`) as one regular expression, for backends without grammars.

A regular expression cannot count nesting: recursive schemas are refused, and so is "any value".
Schemas whose expression would be too long are refused by name.
"""

from __future__ import annotations

import json
from typing import Any

from remora.engine.grammar.characters import JSON_PLAIN
from remora.engine.grammar.constraint import ConstraintError
from remora.engine.grammar.json_schema.integers import DIGIT, integers
from remora.engine.grammar.json_schema.merge import Schema
from remora.engine.grammar.json_schema.termination import target
from remora.engine.grammar.regex import Chars, Choice, Node, Repeat, Series, literal, num_nodes
from remora.engine.grammar.regex_reader import read_pattern

MAX_NODES = 50_000

_EMPTY = Series(())
_ESCAPED = Series((literal("\\"), Chars(tuple((ord(c), ord(c)) for c in '"/\\bfnrt'))))
_STRING_CHAR = Choice((Chars(JSON_PLAIN), _ESCAPED))
_SIGNS = Chars(((0x2B, 0x2B), (0x2D, 0x2D)))
_NUMBER = Series(
    (
        Repeat(literal("-"), 0, 1),
        integers(0, None),
        Repeat(Series((literal("."), Repeat(DIGIT, 1, None))), 0, 1),
        Repeat(Series((literal("e"), Repeat(_SIGNS, 0, 1), Repeat(DIGIT, 1, 2))), 0, 1),
    )
)


def schema_regex(schema: Schema, space: Node) -> Node:
    """Return a pattern for the JSON texts of a plain schema.

    space:  pattern of the whitespace between the parts of a JSON text

    Raises ConstraintError.
    """
    writer = _Writer(schema.get("$defs", {}), space)
    node = writer.value(schema)
    if num_nodes(node) > MAX_NODES:
        raise _beyond("a schema of this size")
    return node


class _Writer:
    """Conversion of one plain schema to a regular expression."""

    def __init__(self, defs: Schema, space: Node) -> None:
        self._defs = defs
        self._space = space
        self._done: dict[str, Node] = {}
        self._above: list[str] = []

    def value(self, schema: Schema) -> Node:
        """Match the values of one place."""
        if "$ref" in schema:
            return self._definition(target(schema))
        if "anyOf" in schema:
            return Choice(tuple(self.value(option) for option in schema["anyOf"]))
        if "enum" in schema:
            return Choice(tuple(self._constant(value) for value in schema["enum"]))
        write = {
            "string": self._string,
            "number": self._number,
            "integer": self._integer,
            "boolean": self._boolean,
            "array": self._array,
            "object": self._object,
        }.get(schema["type"])
        return literal("null") if write is None else write(schema)

    def _definition(self, name: str) -> Node:
        if name in self._above:
            raise _beyond("a schema that refers to itself, or leaves a value free,")
        if name not in self._done:
            self._above.append(name)
            self._done[name] = self.value(self._defs[name])
            self._above.pop()
        return self._done[name]

    def _string(self, schema: Schema) -> Node:
        if "pattern" in schema:
            inner = read_pattern(schema["pattern"], "pattern", is_generated=True)
        else:
            inner = Repeat(_STRING_CHAR, schema.get("minLength", 0), schema.get("maxLength"))
        return _quoted(inner)

    def _number(self, schema: Schema) -> Node:
        if len(schema) > 1:
            raise _beyond("a bound on numbers that are not integers")
        return _NUMBER

    def _integer(self, schema: Schema) -> Node:
        return integers(schema.get("minimum"), schema.get("maximum"))

    def _boolean(self, schema: Schema) -> Node:
        return Choice((literal("true"), literal("false")))

    def _array(self, schema: Schema) -> Node:
        prefix = [self.value(item) for item in schema.get("prefixItems", ())]
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        more: Node = _EMPTY
        if schema["items"] is not False and high != 0:
            item = self.value(schema["items"])
            if not prefix:
                return self._enclosed("[", self._listed(item, low, high), "]")
            most = None if high is None else high - len(prefix)
            more = Repeat(self._after_comma(item), max(low - len(prefix), 0), most)
        # From the last place to the first: the optional continuation.
        for index in reversed(range(len(prefix))):
            here = Series((self._after_comma(prefix[index]) if index else prefix[index], more))
            more = here if index < low else Repeat(here, 0, 1)
        return self._enclosed("[", more, "]")

    def _object(self, schema: Schema) -> Node:
        low, high = schema.get("minProperties", 0), schema.get("maxProperties")
        properties = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        others = schema.get("additionalProperties", False)
        if properties and (others is not False or low or high is not None):
            raise _beyond("'additionalProperties' or a count of properties with 'properties'")
        if properties:
            return self._enclosed("{", self._named(properties, set(schema["required"])), "}")
        if not patterns and others is False:
            return self._enclosed("{", _EMPTY, "}")
        name: Node = Repeat(_STRING_CHAR, 0, None)
        for pattern, node in patterns.items():
            name, others = read_pattern(pattern, "pattern", is_generated=True), node
        pair = self._pair(_quoted(name), self.value(others))
        return self._enclosed("{", self._listed(pair, low, high), "}")

    def _named(self, properties: Schema, required: set[str]) -> Node:
        """Match named properties in order.

        One of those up to the first required property starts; each later one includes its comma.
        """
        pairs = [
            (name in required, self._pair(self._constant(name), self.value(node)))
            for name, node in properties.items()
        ]
        rest: Node = _EMPTY
        options: list[Node] = []
        for is_required, pair in reversed(pairs):
            first = Series((pair, rest))
            options = [first] if is_required else [first, *options]
            later = Series((self._after_comma(pair), rest))
            rest = later if is_required else Series((Repeat(self._after_comma(pair), 0, 1), rest))
        if not required:
            options.append(_EMPTY)
        return Choice(tuple(options))

    def _pair(self, name: Node, value: Node) -> Node:
        return Series((name, self._space, literal(":"), self._space, value))

    def _listed(self, item: Node, low: int, high: int | None) -> Node:
        """Match `low` to `high` items separated by commas."""
        if high == 0:
            return _EMPTY
        more = Repeat(self._after_comma(item), max(low - 1, 0), None if high is None else high - 1)
        some = Series((item, more))
        return some if low else Repeat(some, 0, 1)

    def _after_comma(self, item: Node) -> Node:
        return Series((self._space, literal(","), self._space, item))

    def _enclosed(self, opening: str, inner: Node, closing: str) -> Node:
        return Series((literal(opening), self._space, inner, self._space, literal(closing)))

    def _constant(self, value: Any) -> Node:
        """Match one JSON value written without spaces."""
        return literal(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _quoted(inner: Node) -> Node:
    return Series((literal('"'), inner, literal('"')))


def _beyond(what: str) -> ConstraintError:
    return ConstraintError(f"{what} cannot be enforced by the backend outlines; xgrammar can")
