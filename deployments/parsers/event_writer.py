"""Collects the events of one reply: numbers calls, merges pieces, drops blanks around calls.

Knows no format and reads no text.
"""

from __future__ import annotations

from collections.abc import Callable

from remora.deployments.parsers.events import CallArguments, CallBegun, ReplyEvent, Text

CallIdFactory = Callable[[int, str], str]
"""Returns the id of a call, from its number and its tool's name."""


class EventWriter:
    """The events of one reply.

    make_id:   makes the ids of calls without one
    parallel:  whether calls after the first are kept
    """

    def __init__(self, make_id: CallIdFactory, *, parallel: bool) -> None:
        self.num_calls = 0
        self._make_id = make_id
        self._parallel = parallel
        self._ids: set[str] = set()
        self._events: list[ReplyEvent] = []
        self._has_arguments = False
        self._pieces: list[str] = []
        self._pieces_are_text = True
        self._blank: list[str] | None = []

    def text(self, piece: str) -> None:
        """Add to the answer. Leading blanks are held until other text follows."""
        if not piece:
            return
        if self._blank is not None:
            self._blank.append(piece)
            if piece.isspace():
                return
            piece, self._blank = "".join(self._blank), None
        self._add(piece, is_text=True)

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. Keep `call_id` if it is new in this reply."""
        self.drop_blanks()
        if not self._is_dropped(self.num_calls):
            self._flush()
            if call_id is None or call_id in self._ids:
                call_id = self._make_id(self.num_calls, name)
            self._ids.add(call_id)
            self._events.append(CallBegun(self.num_calls, call_id, name))
        self.num_calls += 1
        self._has_arguments = False

    def arguments(self, piece: str) -> None:
        """Add to the arguments of the last call."""
        self._has_arguments = True
        if not self._is_dropped(self.num_calls - 1):
            self._add(piece, is_text=False)

    def complete(self) -> None:
        """Complete the last call; missing arguments become an empty object."""
        if not self._has_arguments:
            self.arguments("{}")

    def drop_blanks(self) -> None:
        """Drop the text since the last call, or since the start, if it is blank."""
        self._blank = []

    def drain(self) -> list[ReplyEvent]:
        """Return the events since the last `drain`."""
        self._flush()
        events, self._events = self._events, []
        return events

    def finish(self) -> list[ReplyEvent]:
        """Return the last events."""
        if self._blank and self.num_calls == 0:
            self._add("".join(self._blank), is_text=True)
        return self.drain()

    def _is_dropped(self, number: int) -> bool:
        return number > 0 and not self._parallel

    def _add(self, piece: str, *, is_text: bool) -> None:
        if is_text is not self._pieces_are_text:
            self._flush()
            self._pieces_are_text = is_text
        self._pieces.append(piece)

    def _flush(self) -> None:
        if not self._pieces:
            return
        text = "".join(self._pieces)
        self._pieces.clear()
        if text and self._pieces_are_text:
            self._events.append(Text(text))
        elif text:
            self._events.append(CallArguments(self.num_calls - 1 if self._parallel else 0, text))
