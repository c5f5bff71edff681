"""Readers of whole replies: thought first, then what comes after it.

Thought is told apart here and left out of what the tool parser sees, so no call is ever found in
it. Readers also keep where in the raw text the thought stood, from which its tokens are counted.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from remora.deployments.parsers.event_writer import CallIdFactory, EventWriter
from remora.deployments.parsers.events import Reasoning, ReplyEvent, ReplyParser, Text
from remora.deployments.parsers.reasoning import ReasoningSplitter
from remora.deployments.parsers.response_template import (
    CheckpointFormat,
    Part,
    PartFinder,
    PartKind,
)
from remora.deployments.parsers.tool_calls.faults import CallFault, FaultCallback, ignore_fault


class ReasoningAwareParser(ReplyParser, Protocol):
    """A parser that knows where thought stood."""

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """Ranges [start, end) of the raw text's characters that are thought, tags included."""
        ...


class ReplyReader:
    """A `ReplyParser` that also counts the tokens of thought.

    text_of_token:  bytes that a token has in the reply's text; none for those left out
    """

    def __init__(self, parser: ReasoningAwareParser, text_of_token: Callable[[int], bytes]) -> None:
        self._parser = parser
        self._text_of_token = text_of_token

    def push(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of text; return what is certain now."""
        return self._parser.push(text)

    def finish(self) -> list[ReplyEvent]:
        """Return what was held back. Nothing may be pushed afterwards."""
        return self._parser.finish()

    def num_reasoning_tokens(self, token_ids: Iterable[int]) -> int:
        """Return how many of a reply's tokens begin within its thought, as far as it has come."""
        spans = self._parser.reasoning_spans
        return (
            sum(
                any(start <= place < end for start, end in spans)
                for place in _places(map(self._text_of_token, token_ids))
            )
            if spans
            else 0
        )


def _places(texts: Iterable[bytes]) -> Iterable[int]:
    """Yield at which character each text begins."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    place = 0
    for text in texts:
        yield place
        place += len(decoder.decode(text))


class _ReasoningBuffer:
    """Gives out thought as it comes, or in one piece when it has ended."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._held: list[str] = []

    def add(self, text: str) -> list[ReplyEvent]:
        if not text:
            return []
        if self._stream:
            return [Reasoning(text)]
        self._held.append(text)
        return []

    def end(self) -> list[ReplyEvent]:
        text = "".join(self._held)
        self._held.clear()
        return [Reasoning(text)] if text else []


class ReasoningReader:
    """Reads a reply whose thought stands at its beginning. A `ReplyParser`.

    after:     reads what comes after the thought; None = that is text
    separate:  whether thought is told apart; else it is text as it stands, tags included
    stream:    whether thought is given out as it comes
    """

    def __init__(
        self,
        splitter: ReasoningSplitter,
        after: ReplyParser | None,
        *,
        separate: bool = True,
        stream: bool = True,
    ) -> None:
        self._splitter = splitter
        self._after = after
        self._separate = separate
        self._reasoning = _ReasoningBuffer(stream=stream)
        self._num_chars = 0

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """Ranges [start, end) of the raw text's characters that are thought, tags included."""
        return ((0, self._num_chars),) if self._num_chars else ()

    def push(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of text; return what is certain now."""
        events: list[ReplyEvent] = []
        for piece in self._splitter.push(text):
            events += self._read(piece.is_reasoning, piece.text, piece.raw)
        return events

    def finish(self) -> list[ReplyEvent]:
        """Return what was held back. Nothing may be pushed afterwards."""
        events: list[ReplyEvent] = []
        for piece in self._splitter.finish():
            events += self._read(piece.is_reasoning, piece.text, piece.raw)
        events += self._reasoning.end()
        return events + (self._after.finish() if self._after else [])

    def _read(self, is_reasoning: bool, text: str, raw: str) -> list[ReplyEvent]:
        shown = text if self._separate else raw
        if is_reasoning:
            self._num_chars += len(raw)
            if self._separate:
                return self._reasoning.add(shown)
            return [Text(shown)] if shown else []
        events = self._reasoning.end()
        if self._after and shown:
            return events + self._after.push(shown)
        return [*events, Text(shown)] if shown else events


class _Stripped:
    """Text without the blanks at both its ends; `gap` keeps two texts apart."""

    def __init__(self) -> None:
        self._blanks: list[str] = []
        self._has_begun = False

    def add(self, text: str) -> str:
        if not text or text.isspace():
            self._blanks.append(text)
            return ""
        body = text.rstrip()
        shown = "".join(self._blanks) + body if self._has_begun else body.lstrip()
        self._blanks = [text[len(body) :]]
        self._has_begun = True
        return shown

    def gap(self) -> None:
        self._blanks = ["\n"]


class PartReader:
    """Reads a reply by the checkpoint's own template. A `ReplyParser`.

    tools:     in OpenAI's form; None = calls are not looked for
    after:     reads the text, for replies that are held to be calls; None = it is the answer
    """

    def __init__(
        self,
        form: CheckpointFormat,
        prompt: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        after: ReplyParser | None,
        make_id: CallIdFactory,
        parallel: bool = True,
        separate: bool = True,
        stream: bool = True,
        note: FaultCallback = ignore_fault,
    ) -> None:
        self._form = form
        self._note = note
        self._finder = PartFinder(form, prompt)
        self._tools = tools
        self._after = after
        self._separate = separate
        self._writer = EventWriter(make_id, parallel=parallel)
        self._reasoning = _ReasoningBuffer(stream=stream)
        self._shown = {PartKind.TEXT: _Stripped(), PartKind.REASONING: _Stripped()}
        self._call: list[str] = []
        self._num_chars = 0
        self._spans: list[tuple[int, int]] = []

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """Ranges [start, end) of the raw text's characters that are thought, tags included."""
        return self._spans

    def push(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of text; return what is certain now."""
        events: list[ReplyEvent] = []
        for part in self._finder.push(text):
            events += self._read(part)
        return events + self._writer.drain()

    def finish(self) -> list[ReplyEvent]:
        """Return what was held back. Nothing may be pushed afterwards."""
        events: list[ReplyEvent] = []
        for part in self._finder.finish():
            events += self._read(part)
        events += self._reasoning.end() + self._writer.finish()
        return events + (self._after.finish() if self._after else [])

    def _read(self, part: Part) -> list[ReplyEvent]:
        start, self._num_chars = self._num_chars, self._num_chars + len(part.text)
        if part.kind is PartKind.REASONING:
            self._note_reasoning(start)
            return self._read_reasoning(part)
        if part.kind is PartKind.CALLS:
            return self._read_call(part)
        if part.kind is PartKind.OTHER:
            return self._say(part.text)
        if part.kind is PartKind.TEXT and not part.is_mark:
            return self._say(self._shown[part.kind].add(part.text))
        return []

    def _note_reasoning(self, start: int) -> None:
        if self._spans and self._spans[-1][1] == start:
            start = self._spans.pop()[0]
        if self._num_chars > start:
            self._spans.append((start, self._num_chars))

    def _read_reasoning(self, part: Part) -> list[ReplyEvent]:
        if not self._separate:
            return self._say(part.text)
        events = self._writer.drain()
        if not part.is_mark:
            events += self._reasoning.add(self._shown[part.kind].add(part.text))
        if part.ends:
            self._shown[part.kind].gap()
            events += self._reasoning.end()
        return events

    def _read_call(self, part: Part) -> list[ReplyEvent]:
        if self._tools is None:
            return self._say(part.text)
        self._call.append(part.text)
        if not part.ends:
            return []
        text = "".join(self._call)
        self._call.clear()
        calls = self._form.read_calls(text, self._tools)
        if calls is None:
            self._note(CallFault.MALFORMED)
            return self._say(text)
        for name, arguments in calls:
            if not any(tool["function"]["name"] == name for tool in self._tools):
                self._note(CallFault.UNKNOWN_TOOL)
            self._writer.begin(name)
            self._writer.arguments(arguments)
            self._writer.complete()
        return []

    def _say(self, text: str) -> list[ReplyEvent]:
        if self._after is not None:
            return self._writer.drain() + (self._after.push(text) if text else [])
        self._writer.text(text)
        return []
