"""The parser of replies with tool calls, in the notation that a `CallSyntax` describes.

Text outside calls is the answer. A supposed call that fails before its name is certain becomes
text, markers included. A later mistake ends the call at that point.
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
    """The state shared by the functions that parse one reply."""

    reader: TextReader
    writer: EventWriter
    tools: Mapping[str, Tool]
    note: FaultCallback = ignore_fault

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call: the text recorded so far can no longer become part of the answer."""
        if name not in self.tools:
            self.note(CallFault.UNKNOWN_TOOL)
        self.reader.forget()
        self.writer.begin(name, call_id)


ReadCalls = Callable[[ParseContext], Steps[None]]
"""Reads a call or a list of calls after its opening marker. Raises Malformed if it is not one."""


def _read_nothing(context: ParseContext) -> Steps[None]:
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """A notation of calls.

    opens:    markers before calls
    closes:   markers after calls; the first of each kind after a call is not part of the answer
    wrappers: markers before groups of calls; only blanks separate them from `opens`
    read:     reads calls after one of `opens`
    bare:     reads calls without a marker at the start of the reply
    """

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    read: ReadCalls = _read_nothing
    bare: ReadCalls | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers to search for in the answer."""
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
        self._context = ParseContext(
            reader=TextReader(),
            writer=EventWriter(make_id, parallel=parallel),
            tools={tool.name: tool for tool in tools},
            note=note,
        )
        self._open_ends: set[str] = set()
        self._steps = self._read_reply()

    def push(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of text; return the events that are certain now."""
        self._context.reader.feed(text)
        next(self._steps, None)
        return self._context.writer.drain()

    def finish(self) -> list[ReplyEvent]:
        """Return what was held back. Nothing may be pushed afterwards."""
        self._context.reader.end()
        next(self._steps, None)
        return self._context.writer.finish()

    def _read_reply(self) -> Steps[None]:
        reader, writer, syntax = self._context.reader, self._context.writer, self._syntax
        if syntax.bare:
            reader.keep()
            yield from self._try(syntax.bare, is_marked=False)
        if not syntax.markers:
            yield from reader.run(ANYTHING, writer.text)
            return
        markers = Markers(*syntax.markers)
        marker = yield from reader.until(markers, writer.text)
        while marker is not None:
            next_marker = yield from self._read_marked(marker)
            marker = next_marker or (yield from reader.until(markers, writer.text))

    def _read_marked(self, marker: str) -> Steps[str]:
        """Read the calls that a marker opens; return the marker that broke them off, if any."""
        syntax, writer = self._syntax, self._context.writer
        if marker in self._open_ends:
            self._open_ends.discard(marker)
            writer.drop_blanks()
        elif marker in syntax.closes:
            writer.text(marker)
        else:
            self._context.reader.keep(marker)
            is_wrapper = marker in syntax.wrappers
            return (yield from self._try(self._read_group if is_wrapper else syntax.read))
        return ""

    def _try(self, read: ReadCalls, *, is_marked: bool = True) -> Steps[str]:
        """Read calls; return the opening marker that broke them off, if any.

        is_marked:  whether a marker precedes them, so that a supposed call is a fault
        """
        reader, writer = self._context.reader, self._context.writer
        num_calls, broke_off = writer.num_calls, ""
        try:
            yield from read(self._context)
        except Malformed as error:
            if is_marked or writer.num_calls > num_calls:
                self._context.note(
                    CallFault.UNFINISHED if reader.has_ended else CallFault.MALFORMED
                )
            kept = reader.take_kept()
            if error.marker in (*self._syntax.opens, *self._syntax.wrappers):
                broke_off = error.marker
                kept = kept.removesuffix(broke_off)
            writer.text(kept)
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
