"""Stop texts and stop expressions, found in a text that arrives in pieces.

The match that ends first wins, the longest one if several end together. This is decided as soon as
the match is complete, so the result does not depend on the pieces.
"""

from __future__ import annotations

from copy import copy

from remora.engine.tokens.stop_regex import stop_regex


class StopTexts:
    """Searches for the first of `stops` or `patterns`; returns text once it cannot be part of a
    match.

    patterns:  of bounded width; text up to the largest width is held back, since any of it may
               start a match
    include:   whether returned text includes the stop text
    """

    def __init__(
        self, stops: tuple[str, ...], patterns: tuple[str, ...] = (), *, include: bool
    ) -> None:
        self._stops = stops
        self._regexes = [stop_regex(pattern) for pattern in patterns]
        self._widest = int(max((regex.width for regex in self._regexes), default=1))
        self._include = include
        self._held = ""

    @property
    def are_any(self) -> bool:
        """Whether there is anything to search for."""
        return bool(self._stops or self._regexes)

    def push(self, delta: str) -> tuple[str, str | None]:
        """Take a piece of text; return the text to show now, and the stop text if one was found.

        After a match all remaining text has been returned; nothing may be pushed or finished.
        """
        text = self._held + delta
        spans = [
            (start, start + len(stop)) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        spans += [span for regex in self._regexes if (span := regex.find(text)) is not None]
        if spans:
            start, end = min(spans, key=lambda span: (span[1], span[0]))
            return text[: end if self._include else start], text[start:end]
        start = min((_open_start(text, stop) for stop in self._stops), default=len(text))
        start = min(start, max(0, len(text) - (self._widest - 1)))
        self._held = text[start:]
        return text[:start], None

    def fork(self) -> StopTexts:
        """Return a search in a text that is the same so far."""
        return copy(self)  # only the text held back changes

    def finish(self) -> str:
        """Return the text still held back, at the end of the output."""
        return self._held


def _open_start(text: str, stop: str) -> int:
    """Return the start of the longest suffix of `text` that is a prefix of `stop`, or len(text)."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
