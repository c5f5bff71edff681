"""Reads calls in Python's notation, `[add(a=1, b=2), now()]`, with literals as arguments.

Strings are streamed, other values are emitted when they are complete. Anything that is not a
literal becomes a string: `unit=celsius` means "celsius". Nothing is evaluated.
"""

from __future__ import annotations

import re

from remora.deployments.parsers.literals import argument_json, escape, to_json, types_of, unescape
from remora.deployments.parsers.nested_values import read_python_argument
from remora.deployments.parsers.text_reader import (
    BLANKS,
    Malformed,
    Markers,
    Steps,
    TextReader,
    TextSink,
)
from remora.deployments.parsers.tool_calls.call_parser import ParseContext

_IDENTIFIER = re.compile(r"[\w.\-]+")
_ENDS = {end: Markers(end, "\\") for end in ('"', "'", '"""', "'''")}
_MAX_DIGITS = {"x": 2, "u": 4, "U": 8} | dict.fromkeys("01234567", 2)
_ALL_TYPES = types_of(None, {})


def read_python_calls(context: ParseContext) -> Steps[None]:
    """Read a list of calls."""
    reader = context.reader
    yield from reader.run(BLANKS)
    yield from reader.need("[")
    while True:
        yield from reader.run(BLANKS)
        yield from _read_call(context)
        yield from reader.run(BLANKS)
        if (yield from reader.has("]")):
            return
        yield from reader.need(",")
        yield from reader.run(BLANKS)
        if (yield from reader.has("]")):
            return
        reader.keep()


def _read_call(context: ParseContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    name = yield from reader.word(_IDENTIFIER)
    yield from reader.run(BLANKS)
    yield from reader.need("(")
    if not name:
        raise Malformed
    yield from reader.run(BLANKS)
    if (yield from reader.has(")")):
        context.begin(name)
        writer.complete()
        return
    key = yield from _read_key(reader)
    context.begin(name)
    before = "{"
    while True:
        writer.arguments(f"{before}{to_json(key)}: ")
        end = yield from _read_value(context)
        yield from reader.run(BLANKS)
        if end == ")" or (yield from reader.has(")")):
            writer.arguments("}")
            return
        key, before = (yield from _read_key(reader)), ", "


def _read_key(reader: TextReader) -> Steps[str]:
    key = yield from reader.word(_IDENTIFIER)
    yield from reader.run(BLANKS)
    yield from reader.need("=")
    if not key or (yield from reader.sees("=")):
        raise Malformed
    yield from reader.run(BLANKS)
    return key


def _read_value(context: ParseContext) -> Steps[str]:
    """Read one argument; return the `,` or `)` after it."""
    reader, writer = context.reader, context.writer
    char = yield from reader.peek()
    if char and char in "\"'":
        writer.arguments('"')
        yield from _read_string(reader, lambda piece: writer.arguments(escape(piece)))
        writer.arguments('"')
        yield from reader.run(BLANKS)
        end = yield from reader.take()
        if end not in ",)":
            raise Malformed
        return end
    pieces: list[str] = []
    end = yield from read_python_argument(reader, pieces.append)
    writer.arguments(argument_json("".join(pieces).strip(), _ALL_TYPES))
    return end


def _read_string(reader: TextReader, sink: TextSink) -> Steps[None]:
    """Read a string; pass on its value."""
    end = yield from reader.take()
    if (yield from reader.has(end * 2)):
        end *= 3
    while True:
        stop = yield from reader.until(_ENDS[end], sink)
        if stop is None:
            raise Malformed
        if stop == end:
            return
        sink(unescape("\\" + (yield from _read_escape(reader))))


def _read_escape(reader: TextReader) -> Steps[str]:
    """Read an escape after its backslash."""
    escaped = yield from reader.take()
    digits = "01234567" if escaped in "01234567" else "0123456789abcdefABCDEF"
    for _ in range(_MAX_DIGITS.get(escaped, 0)):
        char = yield from reader.peek()
        if not char or char not in digits:
            break
        escaped += yield from reader.take()
    return escaped
