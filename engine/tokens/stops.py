"""Texts that end an output, given as they are or by expressions, in a text that comes in pieces.

The match that ends first wins, the longest one where several end together: that can be decided the
moment it is there, so it does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from remora.engine.tokens.stop_regex import stop_regex


class StopTexts:
    """Looks for the first of `stops` or `patterns`; shows text once it can be no part of one.

    patterns:  of bounded width; up to the widest one's is held back, as nobody tells which text
               begins a match
    include:   whether the text that is shown ends with the stop text, or before it
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
        """Whether there is anything to look for."""
        return bool(self._stops or self._regexes)

    def push(self, delta: str) -> tuple[str, str | None]:
        """Take a piece of text; return what may be shown now, and the stop text if one is there.

        After a match all that is to be shown has been returned; nothing may be pushed or finished.
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

    def finish(self) -> str:
        """Return the text still held back, when no more comes."""
        return self._held


def _open_start(text: str, stop: str) -> int:
    """Return where the longest end of `text` that begins `stop` starts; len(text) if none does."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
