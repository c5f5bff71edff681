"""Replies that must be tool calls: their JSON schema, and their parser.

They do not depend on the model's format. With one named tool, the reply is the object of its
arguments; otherwise it is a list of `{"name": ..., "parameters": {...}}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from remora.deployments.parsers.event_writer import CallIdFactory
from remora.deployments.parsers.events import ReplyParser
from remora.deployments.parsers.nested_values import json_brackets, read_nested
from remora.deployments.parsers.text_reader import BLANKS, Steps
from remora.deployments.parsers.tool_calls.call_parser import CallParser, CallSyntax, ParseContext
from remora.deployments.parsers.tool_calls.faults import FaultCallback, ignore_fault
from remora.deployments.parsers.tool_calls.json_calls import Envelopes
from remora.deployments.parsers.tool_calls.structural_tags import MAX_CALLS
from remora.deployments.parsers.tools import Tool, ToolChoice, ToolUse

_BRACKETS = json_brackets()
_DEFINITIONS = "#/$defs/"
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def forced_schema(use: ToolUse) -> dict[str, Any]:
    """Return the JSON schema of a reply with a forced choice."""
    if use.choice is ToolChoice.NAMED:
        return _object_schema(next(tool for tool in use.tools if tool.name == use.name))
    kinds = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": {"$ref": _definition(number)},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(use.tools)
    ]
    return {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_CALLS if use.parallel else 1,
        "items": kinds[0] if len(kinds) == 1 else {"anyOf": kinds},
        "$defs": {
            f"tool{number}": _moved(_object_schema(tool), _definition(number))
            for number, tool in enumerate(use.tools)
        },
    }


def forced_parser(
    use: ToolUse, make_id: CallIdFactory, note: FaultCallback = ignore_fault
) -> ReplyParser:
    """Return the parser of a reply with a forced choice."""
    if use.choice is ToolChoice.NAMED:
        syntax = CallSyntax(bare=_named_reader(str(use.name)))
    else:
        syntax = CallSyntax(bare=Envelopes())
    return CallParser(syntax, use.tools, make_id, parallel=use.parallel, note=note)


def _named_reader(name: str) -> Callable[[ParseContext], Steps[None]]:
    def read(context: ParseContext) -> Steps[None]:
        reader = context.reader
        yield from reader.run(BLANKS)
        if (yield from reader.sees("{")):
            context.begin(name)
            yield from read_nested(reader, context.writer.arguments, _BRACKETS)
        elif blanks := reader.take_kept():
            if (yield from reader.peek()):  # not an object: the reply is text
                context.writer.text(blanks)
            else:  # cut off before the object
                context.begin(name)

    return read


def _definition(number: int) -> str:
    return f"{_DEFINITIONS}tool{number}"


def _object_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments: an object, without an identifier of its own."""
    schema = tool.enforced_parameters
    return {key: value for key, value in schema.items() if key not in ("$id", "$schema")}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references are adjusted to its new location `place`."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _moved_member(key, value, place) for key, value in schema.items()}


def _moved_member(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value[1:]
    if key in _DATA:
        return value
    if key in _MAPS and isinstance(value, Mapping):
        return {name: _moved(part, place) for name, part in value.items()}
    return _moved(value, place)
