"""Helpers of tests that read replies."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from remora.deployments.parsers.events import (
    CallArguments,
    CallBegun,
    Reasoning,
    ReplyEvent,
    ReplyParser,
    Text,
)

# Marks of DeepSeek's calls: begin, separator, end; begin and end of all.
B, P, E = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
BS, ES = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
# And of Kimi's: begin, arguments, end.
KB, KA, KE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

Read = tuple[str, str, list[tuple[str, str]]]


def make_id(number: int, name: str) -> str:
    return f"id{number}"


def events_of(parser: ReplyParser, texts: Iterable[str]) -> list[ReplyEvent]:
    events = [event for text in texts for event in parser.push(text)]
    return events + parser.finish()


def merged(events: Iterable[ReplyEvent]) -> Read:
    """Return reasoning, answer, and the names and arguments of the calls."""
    reasoning, answer = "", ""
    calls: list[list[str]] = []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning += text
            case Text(text):
                answer += text
            case CallBegun(number, _, name):
                assert number == len(calls)
                calls.append([name, ""])
            case CallArguments(number, text):
                calls[number][1] += text
    return reasoning, answer, [(name, arguments) for name, arguments in calls]


def read(parser: ReplyParser, *texts: str) -> Read:
    return merged(events_of(parser, texts))


def cut(text: str, places: Iterable[int]) -> list[str]:
    bounds = sorted({0, *(place for place in places if place < len(text)), len(text)})
    return [text[first:last] for first, last in pairwise(bounds)]
