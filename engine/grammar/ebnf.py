"""Regular expressions and plain schemas as grammars in xgrammar's EBNF.

xgrammar's own conversion of patterns within schemas accepts wrong texts (`b{1,2}|b|c` matches
"bbb"), and its bounded strings may contain control characters. Its EBNF is reliable. So a schema is
converted with a placeholder name for each such string, and the names become rules written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from remora.engine.grammar.characters import JSON_PLAIN, single
from remora.engine.grammar.json_schema.merge import Schema
from remora.engine.grammar.regex import Chars, Choice, Node, Repeat, render_char, render_ranges
from remora.engine.grammar.regex_reader import read_pattern

# xgrammar prints "ß" as \xdf, and reads following characters as more digits of it.
_PRINTED_HEX = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)")

# xgrammar's rule for free strings; it includes surrogates, which UTF-8 text cannot contain.
_FREE_CHAR = r"[^\0-\u001f\"\\\r\n]"


class StringRules:
    """Rules for the strings of one schema."""

    def __init__(self) -> None:
        self._bodies: list[str] = []

    def name(self, node: Node) -> str:
        """Return the name of a new rule for the content of a string."""
        self._bodies.append(render_ebnf(node))
        return _rule_name(len(self._bodies) - 1)

    def put_into(self, grammar: str) -> str:
        """Return a grammar printed by xgrammar with the placeholder names replaced by rules."""
        grammar = _PRINTED_HEX.sub(_four_digits, grammar)
        grammar = grammar.replace(_FREE_CHAR, render_ebnf(Chars(JSON_PLAIN)))
        for index in range(len(self._bodies)):
            name = _rule_name(index)
            grammar = grammar.replace(f'Regex("{name}", json_string=true)', name)
        rules = (f"{_rule_name(index)} ::= {body}" for index, body in enumerate(self._bodies))
        return "\n".join((grammar.rstrip("\n"), *rules, ""))


def with_named_strings(schema: Schema, rules: StringRules) -> Schema:
    """Return a plain schema whose patterns are names of `rules`."""

    def rename(pattern: str) -> str:
        return rules.name(read_pattern(pattern, "pattern", is_generated=True))

    def string(node: Schema) -> Schema:
        if "pattern" in node:
            return {"type": "string", "pattern": rename(node["pattern"])}
        if len(node) > 1:
            low, high = node.get("minLength", 0), node.get("maxLength")
            return {"type": "string", "pattern": rules.name(Repeat(Chars(JSON_PLAIN), low, high))}
        return node

    return rewrite_strings(schema, string, rename)


def has_patterns(schema: Schema) -> bool:
    """Whether a plain schema contains any pattern."""
    found: list[str] = []

    def note(pattern: str) -> str:
        found.append(pattern)
        return pattern

    def string(node: Schema) -> Schema:
        found.extend([node["pattern"]] if "pattern" in node else [])
        return node

    rewrite_strings(schema, string, note)
    return bool(found)


def rewrite_strings(
    schema: Schema, string: Callable[[Schema], Schema], name: Callable[[str], str]
) -> Schema:
    """Return a plain schema with each string schema and each pattern of names rewritten."""

    def walk(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if node.get("type") == "string":
            return string(node)
        walked = dict(node)
        for key in ("properties", "$defs"):
            if key in node:
                walked[key] = {inner: walk(value) for inner, value in node[key].items()}
        for key in ("anyOf", "prefixItems"):
            if key in node:
                walked[key] = [walk(value) for value in node[key]]
        for key in ("items", "additionalProperties"):
            if key in node:
                walked[key] = walk(node[key])
        if "patternProperties" in node:
            pairs = node["patternProperties"].items()
            walked["patternProperties"] = {name(pattern): walk(value) for pattern, value in pairs}
        return walked

    walked: Schema = walk(schema)
    return walked


def render_ebnf(node: Node) -> str:
    """Write a pattern as the right side of a rule."""
    if isinstance(node, Chars):
        return render_ranges(node.ranges)
    if isinstance(node, Choice):
        return f"({' | '.join(render_ebnf(option) for option in node.options)})"
    if isinstance(node, Repeat):
        high = "" if node.high is None else node.high
        return f"({render_ebnf(node.body)}){{{node.low},{high}}}"
    pieces: list[str] = []
    text = ""
    for part in node.parts:
        char = _single(part)
        if char is not None:
            text += render_char(char)
            continue
        pieces += [f'"{text}"'] if text else []
        text = ""
        pieces.append(render_ebnf(part))
    pieces += [f'"{text}"'] if text or not pieces else []
    return f"({' '.join(pieces)})"


def _single(node: Node) -> int | None:
    """Return the character of a node that stands for a single character, else None."""
    return single(node.ranges) if isinstance(node, Chars) else None


def _four_digits(escape: re.Match[str]) -> str:
    return f"\\u00{escape[1]}" if escape[1] else escape[0]


def _rule_name(index: int) -> str:
    return f"zz{index}zz"
