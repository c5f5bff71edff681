"""Text that arrives in pieces, read by generators that pause where they need more of it.

A parser is written as if all the text were there; `yield from reader.…` pauses it until the next
piece. What a step decides depends on the characters alone, never on where a piece ended, so any
chunking gives the same result. Every character is looked at a bounded number of times: between two
pieces at most the beginning of a marker stays unread. Knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""A piece of parsing: pauses for more text, ends with a T."""

TextSink = Callable[[str], object]
"""Takes pieces of text as they are read."""

BLANKS = re.compile(r"\s+")
ANYTHING = re.compile(r"[\s\S]+")
NAME = re.compile(r"[^\s<>|\[\](){}\"'`,;=]+")
"""What the name of a tool may be made of, in formats that do not quote it."""


class Malformed(Exception):
    """What looked like a call is none, or breaks off. Never leaves a parser.

    marker:  what broke it off and has been read, if anything did
    """

    def __init__(self, marker: str = "") -> None:
        super().__init__(marker)
        self.marker = marker


class Markers:
    """Texts to look for at once; none may hold another, except as its end.

    (One that did could not be told from the other before more text had come.)
    """

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        longest_first = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._max_held = max(map(len, texts)) - 1

    def held_len(self, text: str, start: int) -> int:
        """Length of the longest tail of `text[start:]` that may be the beginning of a marker."""
        for length in range(min(self._max_held, len(text) - start), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


def discard(piece: str) -> None:
    """Take a piece of text and forget it."""


class TextReader:
    """The text of one reply."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._num_fed = 0
        self._has_ended = False
        self._kept: list[str] | None = None

    def feed(self, text: str) -> None:
        """Add a piece; whoever reads may go on."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self._num_fed += len(text)

    def end(self) -> None:
        """Say that there will be no more."""
        self._has_ended = True

    @property
    def num_read(self) -> int:
        """Characters that have been read."""
        return self._num_fed - len(self._text) + self._at

    @property
    def has_ended(self) -> bool:
        """Whether there will be no more."""
        return self._has_ended

    def keep(self, marker: str = "") -> None:
        """Remember `marker` and what is read from now on, in case it has to be given back."""
        self._kept = [marker]

    def forget(self) -> None:
        """Remember no longer."""
        self._kept = None

    def give_back(self) -> str:
        """Return what was read since `keep`; nothing after `forget`."""
        kept, self._kept = self._kept, None
        return "".join(kept or ())

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; nothing at the end."""
        while self._at == len(self._text) and not self._has_ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self) -> Steps[str]:
        """Read the next character.

        Raises:
            Malformed: the text has ended.
        """
        char = yield from self.peek()
        if not char:
            raise Malformed
        return self._read(self._at + 1)

    def sees(self, text: str) -> Steps[bool]:
        """Return whether `text` comes next, without reading it."""
        while True:
            here = self._text[self._at : self._at + len(text)]
            if here == text:
                return True
            if self._has_ended or not text.startswith(here):
                return False
            yield

    def has(self, text: str) -> Steps[bool]:
        """Read `text` if it comes next; return whether it did."""
        if not (yield from self.sees(text)):
            return False
        self._read(self._at + len(text))
        return True

    def need(self, text: str) -> Steps[None]:
        """Read `text`.

        Raises:
            Malformed: something else comes next.
        """
        if not (yield from self.has(text)):
            raise Malformed

    def run(self, pattern: re.Pattern[str], sink: TextSink = discard) -> Steps[None]:
        """Read while characters match `pattern`, a repeated class of characters."""
        while True:
            found = pattern.match(self._text, self._at)
            if found:
                sink(self._read(found.end()))
            if self._at < len(self._text) or self._has_ended:
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read what `run` reads and return it; it may be nothing."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        return "".join(pieces)

    def until(self, markers: Markers, sink: TextSink) -> Steps[str | None]:
        """Read up to and over the next marker; pass on what comes before it.

        Returns the marker; None: the text ended without one.
        """
        while True:
            found = markers.pattern.search(self._text, self._at)
            if found:
                if found.start() > self._at:
                    sink(self._read(found.start()))
                return self._read(found.end())
            held = 0 if self._has_ended else markers.held_len(self._text, self._at)
            if len(self._text) - held > self._at:
                sink(self._read(len(self._text) - held))
            if self._has_ended:
                return None
            yield

    def _read(self, end: int) -> str:
        piece = self._text[self._at : end]
        self._at = end
        if self._kept is not None:
            self._kept.append(piece)
        return piece
