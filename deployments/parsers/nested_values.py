"""Reads nested values up to their end: strings and brackets, in JSON's and Python's notation.

Text is passed on unchanged. Only quotes, escapes and the depth of brackets are checked.
"""

from __future__ import annotations

import json
from functools import cache

from remora.deployments.parsers.text_reader import (
    BLANKS,
    Malformed,
    Markers,
    Steps,
    TextReader,
    TextSink,
)

_QUOTES = {quote: Markers(quote, "\\") for quote in "\"'"}
_PYTHON = Markers(*"\"'()[]{},")


@cache
def json_brackets(*ends: str) -> Markers:
    """Return the marks for `read_nested`; outside strings each of `ends` breaks off a value."""
    return Markers(*'"{}[]', *ends)


PYTHON_BRACKETS = Markers(*"\"'()[]{}")


def read_string(reader: TextReader, sink: TextSink, *, quote: str = '"') -> Steps[None]:
    """Read the rest of a string with its closing quote; pass on escapes unread.

    Raises Malformed if the text ends first.
    """
    while True:
        stop = yield from reader.until(_QUOTES[quote], sink)
        if stop is None:
            raise Malformed
        sink(stop)
        if stop == quote:
            return
        sink((yield from reader.take()))


def read_nested(
    reader: TextReader, sink: TextSink, brackets: Markers, *, depth: int = 0
) -> Steps[None]:
    """Read a value in brackets up to its closing bracket.

    depth:  number of its brackets already read

    Raises Malformed if the text or the call ends first.
    """
    while True:
        stop = yield from reader.until(brackets, sink)
        if stop is None or len(stop) > 1:
            raise Malformed(stop or "")
        sink(stop)
        if stop in _QUOTES:
            yield from read_string(reader, sink, quote=stop)
        else:
            depth += 1 if stop in "([{" else -1
        if depth == 0:
            return


def read_python_argument(reader: TextReader, sink: TextSink) -> Steps[str]:
    """Read an argument and the `,` or `)` after it; return which of the two it was.

    Raises Malformed if the text ends first or another bracket closes.
    """
    depth = 0
    while True:
        stop = yield from reader.until(_PYTHON, sink)
        if stop is None:
            raise Malformed
        if depth == 0 and stop in ",)":
            return stop
        sink(stop)
        if stop in _QUOTES:
            yield from read_string(reader, sink, quote=stop)
        elif stop in "([{":
            depth += 1
        elif stop in ")]}":
            depth -= 1
        if depth < 0:
            raise Malformed


def read_json_text(reader: TextReader) -> Steps[str]:
    """Read a JSON string and the blanks around it; return its value.

    Raises Malformed if it is not a valid string.
    """
    yield from reader.run(BLANKS)
    yield from reader.need('"')
    pieces = ['"']
    yield from read_string(reader, pieces.append)
    yield from reader.run(BLANKS)
    return decode_json_text("".join(pieces))


def decode_json_text(text: str) -> str:
    """Return the value of a JSON string; line breaks in it are tolerated. Raises Malformed."""
    try:
        value = str(json.loads(text, strict=False))
    except ValueError as error:
        raise Malformed from error
    return value.encode(errors="replace").decode()  # UTF-8 cannot hold half a surrogate pair
