"""Where values end: strings and brackets, in JSON's and in Python's notation.

Text is passed on as it stands. Nothing is judged but quotes, escapes and the depth of brackets.
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
    """Return what `read_nested` has to look at; outside strings each of `ends` breaks a value."""
    return Markers(*'"{}[]', *ends)


PYTHON_BRACKETS = Markers(*"\"'()[]{}")


def read_string(reader: TextReader, sink: TextSink, *, quote: str = '"') -> Steps[None]:
    """Read the rest of a string, the closing quote included; escapes are passed on unread.

    Raises:
        Malformed: the text ended first.
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
    """Read a value in brackets, from its first one to the one that closes it.

    depth:  how many of its brackets have been read

    Raises:
        Malformed: the text, or the call, ended first.
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
    """Read up to and over the `,` or `)` that ends an argument; return which one it was.

    Raises:
        Malformed: the text ended first, or another bracket closes.
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
    """Read a JSON string and blanks around it; return what it says.

    Raises:
        Malformed: it is no string, or a broken one.
    """
    yield from reader.run(BLANKS)
    yield from reader.need('"')
    pieces = ['"']
    yield from read_string(reader, pieces.append)
    yield from reader.run(BLANKS)
    return decode_json_text("".join(pieces))


def decode_json_text(text: str) -> str:
    """Return what a JSON string says; line breaks in it are tolerated.

    Raises:
        Malformed: it is broken.
    """
    try:
        said = str(json.loads(text, strict=False))
    except ValueError as error:
        raise Malformed from error
    return said.encode(errors="replace").decode()  # half of a surrogate pair is no text
