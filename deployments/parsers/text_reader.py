"""Reads text that arrives in pieces, with generators that pause until more text arrives.

A parser is written as if it had the whole text; `yield from reader.…` pauses it until the next
piece. Each step depends on the characters alone, never on where a piece ended, so every chunking
produces the same result. Each character is examined a bounded number of times: between two pieces
at most the beginning of a marker stays unread. Knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""A parsing step: pauses for more text, returns a T."""

TextSink = Callable[[str], object]
"""Takes pieces of text as they are read."""

BLANKS = re.compile(r"\s+")
ANYTHING = re.compile(r"[\s\S]+")
NAME = re.compile(r"[^\s<>|\[\](){}\"'`,;=]+")
"""A tool's name, in formats that do not quote it."""


class Malformed(Exception):
    """A supposed call is not a call, or breaks off. Never leaves a parser.

    marker:  the marker, already read, that broke it off, if any
    """

    def __init__(self, marker: str = "") -> None:
        super().__init__(marker)
        self.marker = marker


class Markers:
    """Texts to search for together. None may contain another, except at its end: otherwise the two
    could not be distinguished before more text arrives.
    """

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        longest_first = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._max_held = max(map(len, texts)) - 1

    def held_len(self, text: str, start: int) -> int:
        """Return the length of the longest end of `text[start:]` that may begin a marker."""
        for length in range(min(self._max_held, len(text) - start), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


def discard(piece: str) -> None:
    """Ignore a piece of text."""


class TextReader:
    """The text of one reply."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._num_fed = 0
        self.has_ended = False
        self._kept: list[str] | None = None

    def feed(self, text: str) -> None:
        """Add a piece of text."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self._num_fed += len(text)

    def end(self) -> None:
        """Mark the end of the text."""
        self.has_ended = True

    @property
    def num_read(self) -> int:
        """Number of characters read."""
        return self._num_fed - len(self._text) + self._at

    def keep(self, marker: str = "") -> None:
        """Record `marker` and the text read from now on, for `take_kept`."""
        self._kept = [marker]

    def forget(self) -> None:
        """Stop recording and drop the record."""
        self._kept = None

    def take_kept(self) -> str:
        """Return the text recorded since `keep`, and stop recording; empty after `forget`."""
        kept, self._kept = self._kept, None
        return "".join(kept or ())

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; empty at the end."""
        while self._at == len(self._text) and not self.has_ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self) -> Steps[str]:
        """Read the next character. Raises Malformed at the end of the text."""
        char = yield from self.peek()
        if not char:
            raise Malformed
        return self._read(self._at + 1)

    def sees(self, text: str) -> Steps[bool]:
        """Return whether `text` follows, without reading it."""
        while True:
            here = self._text[self._at : self._at + len(text)]
            if here == text:
                return True
            if self.has_ended or not text.startswith(here):
                return False
            yield

    def has(self, text: str) -> Steps[bool]:
        """Read `text` if it follows; return whether it did."""
        if not (yield from self.sees(text)):
            return False
        self._read(self._at + len(text))
        return True

    def need(self, text: str) -> Steps[None]:
        """Read `text`. Raises Malformed if something else follows."""
        if not (yield from self.has(text)):
            raise Malformed

    def run(self, pattern: re.Pattern[str], sink: TextSink = discard) -> Steps[None]:
        """Read the characters that match `pattern`, a repeated character class."""
        while True:
            found = pattern.match(self._text, self._at)
            if found:
                sink(self._read(found.end()))
            if self._at < len(self._text) or self.has_ended:
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read and return the characters that match `pattern`; possibly none."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        return "".join(pieces)

    def until(self, markers: Markers, sink: TextSink) -> Steps[str | None]:
        """Read up to and including the next marker; pass on the text before it.

        Returns the marker, or None if the text ends without one.
        """
        while True:
            found = markers.pattern.search(self._text, self._at)
            if found:
                if found.start() > self._at:
                    sink(self._read(found.start()))
                return self._read(found.end())
            held = 0 if self.has_ended else markers.held_len(self._text, self._at)
            if len(self._text) - held > self._at:
                sink(self._read(len(self._text) - held))
            if self.has_ended:
                return None
            yield

    def _read(self, end: int) -> str:
        piece = self._text[self._at : end]
        self._at = end
        if self._kept is not None:
            self._kept.append(piece)
        return piece
