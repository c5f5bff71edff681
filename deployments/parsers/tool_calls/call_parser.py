"""The parser of a reply with tool calls; what a call looks like is told by a `CallSyntax`.

Text outside calls is the answer. What looked like a call but turns out to be none before its name
is certain comes back as text, markers and all. Later mistakes end the call where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from remora.deployments.parsers.event_writer import CallIdFactory, EventWriter
from remora.deployments.parsers.events import ReplyEvent
from remora.deployments.parsers.text_reader import (
    ANYTHING,
    BLANKS,
    Malformed,
    Markers,
    Steps,
    TextReader,
)
from remora.deployments.parsers.tool_calls.faults import CallFault, FaultCallback, ignore_fault
from remora.deployments.parsers.tools import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseContext:
    """What the parts of one parser work with."""

    reader: TextReader
    writer: EventWriter
    tools: Mapping[str, Tool]
    note: FaultCallback = ignore_fault

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call: from here on nothing is given back as text."""
        if name not in self.tools:
            self.note(CallFault.UNKNOWN_TOOL)
        self.reader.forget()
        self.writer.begin(name, call_id)


ReadCalls = Callable[[ParseContext], Steps[None]]
"""Reads a call, or a list of them, that has just been opened; raises Malformed if it is none."""


def _read_nothing(context: ParseContext) -> Steps[None]:
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How calls stand in a text.

    opens:    markers before calls
    closes:   markers after calls; the first of each kind after a call is left out of the answer
    wrappers: markers before groups of calls; only blanks stand between them and `opens`
    read:     reads calls after one of `opens`
    bare:     reads calls at the very start of the reply, without a marker
    """

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    read: ReadCalls = _read_nothing
    bare: ReadCalls | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker that is looked for in the answer."""
        return (*self.opens, *self.closes, *self.wrappers)


class CallParser:
    """Reads one reply. A `ReplyParser`."""

    def __init__(
        self,
        syntax: CallSyntax,
        tools: Sequence[Tool],
        make_id: CallIdFactory,
        *,
        parallel: bool,
        note: FaultCallback = ignore_fault,
    ) -> None:
        self._syntax = syntax
        self._desk = ParseContext(
            reader=TextReader(),
            writer=EventWriter(make_id, parallel=parallel),
            tools={tool.name: tool for tool in tools},
            note=note,
        )
        self._open_ends: set[str] = set()
        self._steps = self._read_reply()

    def push(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of text; return what is certain now."""
        self._desk.reader.feed(text)
        next(self._steps, None)
        return self._desk.writer.drain()

    def finish(self) -> list[ReplyEvent]:
        """Return what was held back."""
        self._desk.reader.end()
        next(self._steps, None)
        return self._desk.writer.finish()

    def _read_reply(self) -> Steps[None]:
        reader, writer, syntax = self._desk.reader, self._desk.writer, self._syntax
        if syntax.bare:
            reader.keep()
            yield from self._try(syntax.bare, is_marked=False)
        if not syntax.markers:
            yield from reader.run(ANYTHING, writer.text)
            return
        markers = Markers(*syntax.markers)
        marker = yield from reader.until(markers, writer.text)
        while marker is not None:
            next_one = yield from self._meet(marker)
            marker = next_one or (yield from reader.until(markers, writer.text))

    def _meet(self, marker: str) -> Steps[str]:
        """Read what a marker opens; return the marker of others that broke it off, if any."""
        syntax, writer = self._syntax, self._desk.writer
        if marker in self._open_ends:
            self._open_ends.discard(marker)
            writer.leave_out_blank()
        elif marker in syntax.closes:
            writer.text(marker)
        else:
            self._desk.reader.keep(marker)
            is_wrapper = marker in syntax.wrappers
            return (yield from self._try(self._read_group if is_wrapper else syntax.read))
        return ""

    def _try(self, read: ReadCalls, *, is_marked: bool = True) -> Steps[str]:
        """Read calls; return the marker of others that broke them off, if any.

        is_marked:  whether they stand after a marker, so that what is none is a fault
        """
        reader, writer = self._desk.reader, self._desk.writer
        num_calls, broke_off = writer.num_calls, ""
        try:
            yield from read(self._desk)
        except Malformed as error:
            if is_marked or writer.num_calls > num_calls:
                self._desk.note(CallFault.UNFINISHED if reader.has_ended else CallFault.MALFORMED)
            given_back = reader.give_back()
            if error.marker in (*self._syntax.opens, *self._syntax.wrappers):
                broke_off = error.marker
                given_back = given_back.removesuffix(broke_off)
            writer.text(given_back)
        if writer.num_calls > num_calls:
            self._open_ends.update(self._syntax.closes)
        return broke_off

    def _read_group(self, context: ParseContext) -> Steps[None]:
        yield from context.reader.run(BLANKS)
        for marker in self._syntax.opens:
            if (yield from context.reader.has(marker)):
                yield from self._syntax.read(context)
                return
        raise Malformed
