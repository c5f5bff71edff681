"""Reads calls with JSON arguments, and passes the JSON on as the model wrote it.

Two notations: `Envelopes`, an object with name and arguments; and `NamedObjects`, a name between
markers followed by the object of the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from remora.deployments.parsers.literals import read_literal, to_json
from remora.deployments.parsers.nested_values import (
    PYTHON_BRACKETS,
    decode_json_text,
    json_brackets,
    read_json_text,
    read_nested,
    read_string,
)
from remora.deployments.parsers.text_reader import (
    BLANKS,
    NAME,
    Malformed,
    Steps,
    TextReader,
    TextSink,
    discard,
)
from remora.deployments.parsers.tool_calls.call_parser import ParseContext
from remora.deployments.parsers.tool_calls.faults import CallFault

_NAME_KEY = "name"
_ARGUMENTS_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")
_BETWEEN_MEMBERS = re.compile(r"[\s,]+")
_BETWEEN_CALLS = re.compile(r"[\s,;}\]]+")
_SCALAR = re.compile(r"[^\s,{}\[\]\"]+")


class Envelopes:
    """Reads `{"name": ..., "arguments": {...}}`, or several, or a list of them.

    ends:  markers that end a call anywhere outside strings
    bare:  only the shape of the object identifies a call: the arguments must be an object, and no
           members may be foreign to calls, so that a JSON answer stays an answer
    """

    def __init__(self, *ends: str, bare: bool = False) -> None:
        self._brackets = json_brackets(*ends)
        self._bare = bare

    def __call__(self, context: ParseContext) -> Steps[None]:
        """Read calls while more follow."""
        reader = context.reader
        yield from reader.run(BLANKS)
        if (yield from reader.has("[")):
            yield from reader.run(BLANKS)
        yield from self._read_call(context)
        while True:
            yield from reader.run(_BETWEEN_CALLS)
            if not (yield from reader.sees("{")):
                return
            reader.keep()
            yield from self._read_call(context)

    def _read_call(self, context: ParseContext) -> Steps[None]:
        reader, call = context.reader, _PendingCall(context, waits_for_arguments=self._bare)
        yield from reader.need("{")
        yield from reader.run(BLANKS)
        if (yield from reader.sees("'")):
            yield from _read_python_dict(call)
            return
        while True:
            yield from reader.run(_BETWEEN_MEMBERS)
            if (yield from reader.has("}")):
                break
            yield from self._read_member(call, (yield from read_json_text(reader)))
        call.complete()

    def _read_member(self, call: _PendingCall, key: str) -> Steps[None]:
        reader = call.context.reader
        yield from reader.need(":")
        if key == _NAME_KEY and not call.name:
            call.set_name((yield from read_json_text(reader)))
            return
        yield from reader.run(BLANKS)
        if key in _ARGUMENTS_KEYS and not call.has_arguments:
            yield from self._read_arguments(call)
        elif self._bare and key not in _OTHER_KEYS:
            raise Malformed
        else:
            yield from self._read_value(reader, discard)

    def _read_arguments(self, call: _PendingCall) -> Steps[None]:
        reader = call.context.reader
        if (yield from reader.sees("{")):
            call.open_arguments()
            yield from read_nested(reader, call.add, self._brackets)
            return
        if self._bare:
            raise Malformed
        pieces: list[str] = []
        yield from self._read_value(reader, pieces.append)
        text = "".join(pieces)
        if text.startswith('"'):
            text = decode_json_text(text)
        call.open_arguments()
        if text.strip() not in ("", "null"):
            if not text.lstrip().startswith("{"):
                call.context.note(CallFault.MALFORMED)
            call.add(text)

    def _read_value(self, reader: TextReader, sink: TextSink) -> Steps[None]:
        char = yield from reader.peek()
        if char and char in "{[":
            yield from read_nested(reader, sink, self._brackets)
        elif char == '"':
            sink((yield from reader.take()))
            yield from read_string(reader, sink)
        else:
            yield from reader.run(_SCALAR, sink)


class _PendingCall:
    """One call, begun once its name is certain; until then its arguments are held."""

    def __init__(self, context: ParseContext, *, waits_for_arguments: bool) -> None:
        self.context = context
        self.name = ""
        self.has_arguments = False
        self._waits_for_arguments = waits_for_arguments
        self._has_begun = False
        self._held: list[str] = []

    def set_name(self, name: str) -> None:
        self.name = name
        self._try_to_begin()

    def open_arguments(self) -> None:
        self.has_arguments = True
        self._try_to_begin()

    def add(self, piece: str) -> None:
        if self._has_begun:
            self.context.writer.arguments(piece)
        else:
            self._held.append(piece)

    def complete(self) -> None:
        if not self._has_begun:
            raise Malformed
        self.context.writer.complete()

    def _try_to_begin(self) -> None:
        if self._has_begun or not self.name:
            return
        if self._waits_for_arguments and not self.has_arguments:
            return
        self._has_begun = True
        self.context.begin(self.name)
        for piece in self._held:
            self.context.writer.arguments(piece)


def _read_python_dict(call: _PendingCall) -> Steps[None]:
    """Read the rest of a call written as a Python dictionary, and convert it to JSON."""
    pieces = ["{"]
    yield from read_nested(call.context.reader, pieces.append, PYTHON_BRACKETS, depth=1)
    try:
        members = read_literal("".join(pieces))
    except ValueError as error:
        raise Malformed from error
    if not isinstance(members, dict):
        raise Malformed
    name = members.get(_NAME_KEY)
    arguments = next((members[key] for key in _ARGUMENTS_KEYS if key in members), None)
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise Malformed
    try:
        text = to_json(arguments)
    except ValueError as error:
        raise Malformed from error
    call.set_name(name)
    call.open_arguments()
    call.add(text)
    call.complete()


def plain_name(name: str) -> tuple[str, str | None]:
    """Return the name itself, and no id."""
    return name, None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedObjects:
    """Reads a name and the object of its arguments.

    lead:     text before the name
    name_end: text after the name; blanks around it are ignored
    id_mark:  optional text after the name, followed by an id
    tail:     optional text after the arguments
    split:    splits the written name into name and id
    ends:     markers that end the arguments anywhere outside strings
    """

    name_end: str
    lead: str = ""
    id_mark: str | None = None
    tail: str = ""
    split: Callable[[str], tuple[str, str | None]] = plain_name
    ends: tuple[str, ...]

    def __call__(self, context: ParseContext) -> Steps[None]:
        """Read one call."""
        reader = context.reader
        yield from reader.run(BLANKS)
        yield from reader.need(self.lead)
        name, call_id = self.split((yield from reader.word(NAME)))
        yield from reader.run(BLANKS)
        if self.id_mark and (yield from reader.has(self.id_mark)):
            call_id = (yield from reader.word(NAME)) or None
        yield from reader.need(self.name_end)
        if not name:
            raise Malformed
        context.begin(name, call_id)
        yield from reader.run(BLANKS)
        if (yield from reader.sees("{")):
            brackets = json_brackets(*self.ends)
            yield from read_nested(reader, context.writer.arguments, brackets)
        context.writer.complete()
        yield from reader.run(BLANKS)
        yield from reader.has(self.tail)
