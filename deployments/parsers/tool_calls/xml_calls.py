"""Reads calls with one tagged text per argument, and converts the arguments to JSON.

An argument that must be a string is streamed. Any other waits until it is complete, because `1`
may become a number or a longer string.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from remora.deployments.parsers.literals import argument_json, escape, to_json, types_of
from remora.deployments.parsers.nested_values import json_brackets, read_nested
from remora.deployments.parsers.text_reader import BLANKS, NAME, Malformed, Markers, Steps
from remora.deployments.parsers.tool_calls.call_parser import ParseContext

_TEXT = frozenset({"string"})


class ArgumentType(Enum):
    """Type of a written argument: by the tool's schema, a string, or any literal."""

    BY_SCHEMA = "by_schema"
    TEXT = "text"
    VALUE = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlCalls:
    """Reads a name and tagged arguments.

    name_end:    text after the name; if empty, an argument or `close` must follow
    key_open:    text before an argument's name
    key_ends:    texts after an argument's name, and the argument's type
    value_open:  text before the value, after blanks
    value_ends:  texts after the value; they may end with `key_open` or `close`
    close:       text that ends the call
    trims:       whether to ignore one line break at the start of a value
    """

    name_end: str = ""
    key_open: str
    key_ends: Mapping[str, ArgumentType]
    value_open: str = ""
    value_ends: tuple[str, ...]
    close: str
    trims: bool = False

    def __call__(self, context: ParseContext) -> Steps[None]:
        """Read one call."""
        reader, writer = context.reader, context.writer
        yield from reader.run(BLANKS)
        name = yield from reader.word(NAME)
        yield from self._check_name(context, name)
        context.begin(name)
        yield from reader.run(BLANKS)
        if (yield from reader.sees("{")):
            yield from read_nested(reader, writer.arguments, json_brackets(self.close))
        yield from self._read_arguments(context, name)
        writer.complete()

    def _check_name(self, context: ParseContext, name: str) -> Steps[None]:
        reader = context.reader
        if not name:
            raise Malformed
        if self.name_end:
            yield from reader.need(self.name_end)
            return
        yield from reader.run(BLANKS)
        if not ((yield from reader.sees(self.key_open)) or (yield from reader.sees(self.close))):
            raise Malformed

    def _read_arguments(self, context: ParseContext, name: str) -> Steps[None]:
        reader, writer = context.reader, context.writer
        parts, key_ends = Markers(self.key_open, self.close), Markers(*self.key_ends)
        num_arguments = 0
        # Text between arguments belongs to the answer.
        part = yield from reader.until(parts, writer.text)
        while part is not None and part.endswith(self.key_open):
            key: list[str] = []
            key_end = yield from reader.until(key_ends, key.append)
            if key_end is None:
                raise Malformed
            writer.arguments(f"{', ' if num_arguments else '{'}{to_json(''.join(key))}: ")
            num_arguments += 1
            types = self._types(context, name, "".join(key), self.key_ends[key_end])
            part = yield from self._read_value(context, types)
            if not part.endswith((self.key_open, self.close)):
                part = yield from reader.until(parts, writer.text)
        if part is None:
            raise Malformed
        if num_arguments:
            writer.arguments("}")

    def _read_value(self, context: ParseContext, types: frozenset[str]) -> Steps[str]:
        """Read one value; return the text that ended it."""
        reader, writer = context.reader, context.writer
        if self.value_open:
            yield from reader.run(BLANKS)
            yield from reader.need(self.value_open)
        if self.trims:
            yield from reader.has("\n")
        ends, pieces = Markers(*self.value_ends), list[str]()
        if types == _TEXT:
            writer.arguments('"')
            end = yield from reader.until(ends, lambda piece: writer.arguments(escape(piece)))
        else:
            end = yield from reader.until(ends, pieces.append)
        if end is None:
            raise Malformed
        writer.arguments('"' if types == _TEXT else argument_json("".join(pieces), types))
        return end

    def _types(
        self, context: ParseContext, name: str, key: str, kind: ArgumentType
    ) -> frozenset[str]:
        if kind is ArgumentType.TEXT:
            return _TEXT
        tool = context.tools.get(name)
        if kind is ArgumentType.VALUE or tool is None:
            return types_of(None, {})
        properties = tool.parameters.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return types_of(schema, tool.parameters)
