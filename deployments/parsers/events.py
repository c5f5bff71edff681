"""Events that parsers emit for the text of a reply.

Concatenated pieces of one kind do not depend on how the text was cut into chunks. A parser never
raises: text that is malformed in its format becomes `Text`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


# Text and Reasoning are made for each token; a frozen dataclass takes three times as long to make.
@dataclass(slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of a tool call. `number` counts the reply's calls from 0; `id` is unique."""

    number: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of call `number`; concatenated, the pieces are a JSON object."""

    number: int
    text: str


ReplyEvent = Text | Reasoning | CallBegun | CallArguments


class ReplyParser(Protocol):
    """Turns one reply's text into events. Each reply has its own parser."""

    def push(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of text; return the events that are certain now."""
        ...

    def finish(self) -> list[ReplyEvent]:
        """Return what was held back. Nothing may be pushed afterwards."""
        ...
