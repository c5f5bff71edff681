"""What a model's text turns out to be, piece by piece.

Parsers take text as it comes and give back events; the pieces of one kind, put together, are the
whole, and do not depend on how the text was cut. A parser never raises: text that is malformed in
its format comes back as `Text`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call has begun. `number` counts the calls of one reply from 0; `id` is unique."""

    number: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of call `number`; all pieces together are one JSON object."""

    number: int
    text: str


ReplyEvent = Text | Reasoning | CallBegun | CallArguments


class ReplyParser(Protocol):
    """Turns one reply's text into events. Made anew for each reply."""

    def push(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of text; return what is certain now."""
        ...

    def finish(self) -> list[ReplyEvent]:
        """Return what was held back. Nothing may be pushed afterwards."""
        ...
