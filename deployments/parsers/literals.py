"""Converts values that a model wrote as text to JSON.

Knows the literals of Python and JSON, and the types that a schema allows. The parser is our own:
nothing that a model writes is evaluated. Work is linear in the text, and nesting is bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_DEPTH = 64
_MAX_HOPS = 4
_MAX_BRANCHES = 32
_TOKEN = re.compile(
    r"\s+"
    r"|(?P<string>\"\"\"(?:[^\\]|\\[\s\S])*?\"\"\"|'''(?:[^\\]|\\[\s\S])*?'''"
    r"|\"(?:[^\"\\]++|\\[\s\S])*+\"|'(?:[^'\\]++|\\[\s\S])*+')"
    r"|(?P<number>[+-]?(?:0[xX][0-9a-fA-F]+|(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.]))"
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<mark>[\[\](){},:])"
)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CLOSES = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = re.compile('["\\\\\x00-\x1f\ud800-\udfff]')
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[0-7]{1,3}|[\s\S])")
_ESCAPED = dict(zip("\n\\'\"abfnrtv", "\0\\'\"\a\b\f\n\r\t\v", strict=True)) | {"\n": ""}

_TYPE_NAMES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
_EVERY_TYPE = frozenset({"null", *(name for _, name in _TYPE_NAMES)})


def escape(text: str) -> str:
    """Escape `text` for a JSON string, without the quotes."""
    return to_json(text)[1:-1] if _ESCAPES.search(text) else text


def to_json(value: Any) -> str:
    """Return `value` as JSON that UTF-8 can encode. Raises ValueError for NaN and infinity."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def unescape(text: str) -> str:
    """Resolve the escapes of a Python or JSON string; `text` has no quotes."""
    return _ESCAPE.sub(_unescaped, text)


def read_literal(text: str) -> Any:
    """Return the value of a Python or JSON literal.

    Raises ValueError if it is not a literal or nested too deep.
    """
    stack: list[tuple[str, list[Any]]] = [("", [])]  # frames: closing mark, items so far
    for kind, token in _tokens(text):
        closes, items = stack[-1]
        if kind == "value":
            _add(items, token)
        elif token in _CLOSES:
            if len(stack) > _MAX_DEPTH:
                raise ValueError("nested too deep")
            stack.append((_CLOSES[token], []))
        elif token == closes:
            stack.pop()
            _add(stack[-1][1], _built(closes, items))
        elif closes and token in ",:" and items and not isinstance(items[-1], _Mark):
            items.append(_MARKS[token])
        else:
            raise ValueError("not a literal")
    if len(stack) != 1 or len(stack[0][1]) != 1:
        raise ValueError("not one literal")
    return stack[0][1][0]


def argument_json(text: str, types: frozenset[str]) -> str:
    """Return an unquoted argument as JSON, given the types that its schema allows.

    A literal of an allowed type keeps its value, as does any literal where strings are not allowed.
    Everything else is a string.
    """
    read = _read_json(text.strip())
    if read is not None:
        found, value_type = read
        if value_type in types or "string" not in types:
            return found
        if value_type == "integer" and "number" in types:
            return found
    return to_json(text)


def types_of(schema: Any, root: Mapping[str, Any], hops: int = _MAX_HOPS) -> frozenset[str]:
    """Return the JSON types that `schema`, a part of `root`, allows; all if it names none."""
    if not isinstance(schema, Mapping) or hops == 0:
        return _EVERY_TYPE
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset((declared,))
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            return frozenset(map(_type_of, values))
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(_resolve(reference, root), root, hops - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(key), list) and branches:
            found = [types_of(branch, root, hops - 1) for branch in branches[:_MAX_BRANCHES]]
            if key == "allOf":
                return frozenset.intersection(*found)
            return frozenset().union(*found)
    return _EVERY_TYPE


class _Mark:
    """A comma or colon among the items of a frame."""


_MARKS = {",": _Mark(), ":": _Mark()}


def _tokens(text: str) -> Iterator[tuple[str, Any]]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError("not a literal")
        at = found.end()
        token = found[0]
        if found.lastgroup == "string":
            width = 3 if token[:3] in ('"""', "'''") and len(token) >= 6 else 1
            yield "value", unescape(token[width:-width])
        elif found.lastgroup == "number":
            yield "value", _number(token)
        elif found.lastgroup == "word":
            if token not in _WORDS:
                raise ValueError("not a literal")
            yield "value", _WORDS[token]
        elif found.lastgroup == "mark":
            yield "mark", token


def _add(items: list[Any], value: Any) -> None:
    if items and not isinstance(items[-1], _Mark):
        raise ValueError("two values in a row")
    items.append(value)


def _built(closes: str, items: list[Any]) -> Any:
    """Return the list or dictionary made of these items and marks."""
    if items and items[-1] is _MARKS[","]:
        items.pop()
    if closes != "}":
        if any(mark is not _MARKS[","] for mark in items[1::2]):
            raise ValueError("a colon in a list")
        return items[::2]
    marks = items[1::2]
    if len(items) % 4 != 3 and items:
        raise ValueError("not a dictionary")
    if any(mark is not _MARKS[",:"[number % 2 == 0]] for number, mark in enumerate(marks)):
        raise ValueError("not a dictionary")
    return {_key(key): value for key, value in zip(items[::4], items[2::4], strict=True)}


def _key(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, dict)):
        raise ValueError("not a key")
    return json.dumps(value)


def _number(token: str) -> int | float:
    if "x" in token or "X" in token:
        return int(token, 16)
    if re.fullmatch(r"[+-]?\d[\d_]*", token):
        return int(token)
    return float(token)


def _unescaped(found: re.Match[str]) -> str:
    what = found[1]
    if what[0] in "uUx" and len(what) > 1:
        code = int(what[1:], 16)
        return chr(code) if code <= 0x10FFFF else found[0]
    if what[0] in "01234567":
        return chr(int(what, 8))
    if what == "/":
        return what
    return _ESCAPED.get(what, found[0])


def _read_json(text: str) -> tuple[str, str] | None:
    """Return `text` as JSON and its type; None if it is not a JSON value."""
    try:
        return text, _type_of(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        pass
    try:
        value = read_literal(text)
        return to_json(value), _type_of(value)
    except ValueError:
        return None


def _refuse(text: str) -> None:
    raise ValueError(text)


def _type_of(value: Any) -> str:
    return next((name for kind, name in _TYPE_NAMES if isinstance(value, kind)), "null")


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference into the same schema, or None."""
    found: Any = root
    if not reference.startswith("#"):
        return None
    for key in filter(None, reference[1:].split("/")):
        key = key.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
