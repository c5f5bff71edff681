"""Structural tags for tool calls, in xgrammar's notation.

`triggered` leaves text free until a call opens; the call must then name a tool on offer, and its
arguments match the schema of a strict tool or are any object. `calls_alone` allows no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from remora.deployments.parsers.tools import Tool

Tag = dict[str, Any]
TagFactory = Callable[[Sequence[Tool]], list[Tag]]


MAX_CALLS = 16
"""Most calls in a reply of calls only."""


def triggered(triggers: Sequence[str], tags: list[Tag]) -> Tag:
    """Return a structural tag that starts one of `tags` wherever one of `triggers` occurs."""
    return {"format": {"type": "triggered_tags", "triggers": list(triggers), "tags": tags}}


def calls_alone(
    tags: list[Tag], around: tuple[Sequence[str], Sequence[str]], between: str, *, parallel: bool
) -> Tag:
    """Return the format of a reply of calls only.

    around:   optional texts before, and after, calls
    between:  characters of which a few may separate calls
    """
    blanks = {"type": "regex", "pattern": f"[{between}]{{0,4}}"}
    before, after = ([*_optional(texts, blanks)] for texts in around)
    calls = {"type": "sequence", "elements": [*before, _one_of(tags), blanks, *after]}
    return {"type": "repeat", "min": 1, "max": MAX_CALLS if parallel else 1, "content": calls}


def between(opening: Tag, closing: str) -> Tag:
    """Return the format of any text between `opening` and `closing`."""
    return {"type": "sequence", "elements": [opening, tag("", {"type": "any_text"}, closing)]}


def _optional(texts: Sequence[str], blanks: Tag) -> Iterator[Tag]:
    if texts:
        marked = {"type": "sequence", "elements": [one_of_texts(texts), blanks]}
        yield {"type": "optional", "content": marked}


def one_of_texts(texts: Sequence[str]) -> Tag:
    """Return the format of any of `texts`."""
    return _one_of([{"type": "const_string", "value": text} for text in texts])


def _one_of(elements: list[Tag]) -> Tag:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def tag(begin: str, content: Tag, end: str) -> Tag:
    """Return one tag."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def arguments(tool: Tool, style: str = "json") -> Tag:
    """Return the format of a call's arguments."""
    schema = tool.enforced_parameters if tool.strict else {"type": "object"}
    return {"type": "json_schema", "json_schema": schema, "style": style}


def list_of(tags: list[Tag], separator: str) -> Tag:
    """Return the format of one or more of `tags`."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
    }


def tool_tags(begin: str, end: str, style: str = "json") -> TagFactory:
    """Return a factory of one tag for each tool; `NAME` in `begin` stands for its name."""

    def make(tools: Sequence[Tool]) -> list[Tag]:
        return [
            tag(begin.replace("NAME", tool.name), arguments(tool, style), end) for tool in tools
        ]

    return make


def list_tags(*begins: str) -> TagFactory:
    """Return a factory of tags for JSON lists of calls that open with one of `begins`."""

    def make(tools: Sequence[Tool]) -> list[Tag]:
        listed = tool_tags('{"name": "NAME", "arguments": ', "}")(tools)
        return [tag(begin, list_of(listed, ", "), "]") for begin in begins]

    return make


def mistral_tags(tools: Sequence[Tool]) -> list[Tag]:
    """Return the tags of both of Mistral's notations."""
    named = tool_tags("[TOOL_CALLS]NAME[ARGS]", "")(tools)
    return [*named, *list_tags("[TOOL_CALLS] [", "[TOOL_CALLS][")(tools)]


def python_tags(tools: Sequence[Tool]) -> list[Tag]:
    """Return tags of lists that begin with a call of each tool; the rest is free text."""
    return [tag(f"[{tool.name}(", {"type": "any_text"}, ")]") for tool in tools]


def kimi_tags(tools: Sequence[Tool]) -> list[Tag]:
    """Return tags with a sequence number after the name."""
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
