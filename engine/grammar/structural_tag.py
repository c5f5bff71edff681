"""Structural tags whose schemas, patterns and grammars are brought within limits.

Accepts both forms: the old one, {"structures": [{begin, schema, end}], "triggers": [...]}, and
xgrammar's, {"format": {...}}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remora.engine.grammar.constraint import ConstraintError
from remora.engine.grammar.ebnf import has_patterns
from remora.engine.grammar.json_schema.schema import plain_schema
from remora.engine.grammar.regex import render
from remora.engine.grammar.regex_reader import read_pattern
from remora.engine.grammar.source_limits import check_ebnf

# Formats without content to check, and formats that contain other formats.
_LEAVES = frozenset({"const_string", "any_text", "token", "exclude_token", "any_tokens", "grammar"})
_SINGLE = frozenset({"tag", "optional", "plus", "star", "repeat"})
_SERIES = {
    "sequence": "elements",
    "or": "elements",
    "triggered_tags": "tags",
    "token_triggered_tags": "tags",
    "tags_with_separator": "tags",
}
MAX_REPEAT = 10_000


def plain_tag(tag: Any, *, max_spaces: int) -> dict[str, Any]:
    """Rewrite a structural tag (parsed JSON).

    max_spaces:  whitespace characters allowed in one place of its JSON

    Raises ConstraintError.
    """
    if not isinstance(tag, dict):
        raise ConstraintError("a structural tag must be an object")
    if "structures" in tag:
        tag = {"format": from_old_form(tag)}
    if "format" not in tag:
        raise ConstraintError("a structural tag needs 'format', or 'structures' and 'triggers'")
    return {"type": "structural_tag", "format": _format(tag["format"], "format", max_spaces)}


def from_old_form(tag: dict[str, Any]) -> dict[str, Any]:
    """Convert a tag of the old form to a format. Raises ConstraintError."""
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ConstraintError("'structures' and 'triggers' must be lists")
    tags = []
    for index, structure in enumerate(structures):
        if not isinstance(structure, dict) or not structure.keys() >= {"begin", "schema", "end"}:
            raise ConstraintError(f"structures/{index} must be an object of begin, schema and end")
        content = {"type": "json_schema", "json_schema": structure["schema"]}
        ends = {end: structure[end] for end in ("begin", "end")}
        tags.append({"type": "tag", **ends, "content": content})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _format(node: Any, path: str, max_spaces: int) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise ConstraintError(f"{path} must be an object")
    kind = str(node.get("type"))

    def inner(value: Any, place: str) -> dict[str, Any]:
        return _format(value, f"{path}/{place}", max_spaces)

    if kind in _LEAVES:
        if kind == "grammar":
            check_ebnf(str(node.get("grammar")))
        return node
    if kind == "regex":
        pattern = node.get("pattern")
        if not isinstance(pattern, str):
            raise ConstraintError(f"{path}/pattern must be a text")
        return {"type": "regex", "pattern": render(read_pattern(pattern, f"{path}/pattern"))}
    if kind in ("json_schema", "qwen_xml_parameter"):
        return _json_format(node, path, max_spaces)
    if kind in _SINGLE:
        if kind == "repeat":
            _check_repeat(node, path)
        return {**node, "content": inner(node.get("content"), "content")}
    if kind in _SERIES:
        key = _SERIES[kind]
        return {**node, key: _each(node.get(key), f"{path}/{key}", inner, key)}
    if kind in ("dispatch", "token_dispatch"):
        rules = node.get("rules")
        if not isinstance(rules, list) or any(
            not isinstance(rule, list) or len(rule) != 2 for rule in rules
        ):
            raise ConstraintError(f"{path}/rules must be a list of pairs")
        return {**node, "rules": [[key, inner(value, "rules")] for key, value in rules]}
    raise ConstraintError(f"{path}: no format is called {kind[:50]!r}")


def _each(
    value: Any, path: str, inner: Callable[[Any, str], dict[str, Any]], key: str
) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ConstraintError(f"{path} must be a list")
    return [inner(item, f"{key}/{index}") for index, item in enumerate(value)]


def _json_format(node: dict[str, Any], path: str, max_spaces: int) -> dict[str, Any]:
    for loose in ("any_order", "excludes"):
        if node.get(loose):
            raise ConstraintError(
                f"{path}: {loose!r} cannot be combined with a schema that is to be kept to"
            )
    schema = node.get("json_schema")
    try:
        plain = plain_schema(schema)
    except ConstraintError as error:
        raise ConstraintError(f"{path}/json_schema: {error}") from None
    style = str(node.get("style", "json"))
    style = "qwen_xml" if node["type"] == "qwen_xml_parameter" else style
    if style != "json" and has_patterns(plain):
        raise ConstraintError(
            f"{path}: patterns and formats cannot be enforced in the style {style!r}"
        )
    spaces = {} if style == "json" else {"max_whitespace_cnt": max_spaces}
    return {"type": "json_schema", "json_schema": plain, "style": style, **spaces}


def _check_repeat(node: dict[str, Any], path: str) -> None:
    for end in ("min", "max"):
        value = node.get(end)
        if isinstance(value, bool) or not isinstance(value, int) or value > MAX_REPEAT:
            raise ConstraintError(f"{path}/{end} must be an integer of at most {MAX_REPEAT}")
