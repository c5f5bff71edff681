"""Stop strings in a text that arrives in pieces.

The match that ends first wins, the longest one where several end together: that can be decided the
moment it is there, so it does not depend on how the text was cut into pieces.
"""

from __future__ import annotations


class StopStrings:
    """Looks for the first of `stops`; shows text as soon as it can be no part of one.

    include:  whether the text that is shown ends with the stop string, or before it
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, delta: str) -> tuple[str, str | None]:
        """Take a piece of text; return what may be shown now, and the stop string if one is there.

        After a match all that is to be shown has been returned; nothing may be pushed or finished.
        """
        text = self._held + delta
        matches = [
            (start + len(stop), -len(stop), stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if matches:
            end, _, stop = min(matches)
            return text[: end if self._include else end - len(stop)], stop
        start = min((_open_start(text, stop) for stop in self._stops), default=len(text))
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
