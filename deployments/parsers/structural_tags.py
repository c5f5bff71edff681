"""Structural tags, in xgrammar's notation: the arguments of strict tools match their schemas.

Text stays free until a call opens; from then on a tool that is offered has to be called, and its
arguments match its schema if it is strict, and are any object if not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from remora.deployments.parsers.tools import Tool

Tag = dict[str, Any]
MakeTags = Callable[[Sequence[Tool]], list[Tag]]


def triggered(triggers: Sequence[str], tags: list[Tag]) -> Tag:
    """Return the structural tag that begins a tag wherever one of `triggers` is written."""
    return {"format": {"type": "triggered_tags", "triggers": list(triggers), "tags": tags}}


def tag(begin: str, content: Tag, end: str) -> Tag:
    """Return one tag."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def arguments(tool: Tool, style: str = "json") -> Tag:
    """Return what the arguments of a call look like."""
    schema = {"type": "object"} | (dict(tool.parameters) if tool.strict else {})
    return {"type": "json_schema", "json_schema": schema, "style": style}


def list_of(tags: list[Tag], separator: str) -> Tag:
    """Return one or more of `tags`."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
    }


def tool_tags(begin: str, end: str, style: str = "json") -> MakeTags:
    """Return who makes a tag for each tool; `NAME` in `begin` stands for its name."""

    def make(tools: Sequence[Tool]) -> list[Tag]:
        return [
            tag(begin.replace("NAME", tool.name), arguments(tool, style), end) for tool in tools
        ]

    return make


def mistral_tags(tools: Sequence[Tool]) -> list[Tag]:
    """Return the tags of both of Mistral's notations."""
    listed = tool_tags('{"name": "NAME", "arguments": ', "}")(tools)
    return [
        *tool_tags("[TOOL_CALLS]NAME[ARGS]", "")(tools),
        tag("[TOOL_CALLS] [", list_of(listed, ", "), "]"),
        tag("[TOOL_CALLS][", list_of(listed, ", "), "]"),
    ]


def kimi_tags(tools: Sequence[Tool]) -> list[Tag]:
    """Return tags in which a running number follows the name."""
    return [
        tag(
            f"<|tool_call_begin|>functions.{tool.name}:",
            {
                "type": "sequence",
                "elements": [
                    {"type": "regex", "pattern": "[0-9]{1,4}"},
                    {"type": "const_string", "value": "<|tool_call_argument_begin|>"},
                    arguments(tool),
                ],
            },
            "<|tool_call_end|>",
        )
        for tool in tools
    ]
