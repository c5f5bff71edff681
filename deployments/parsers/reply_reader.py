"""Readers of whole replies: reasoning first, then the answer and its tool calls.

Reasoning is removed before the tool-call parser sees the text, so no call is ever found in it.
Readers also record where in the raw text the reasoning was, to count its tokens.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from remora.deployments.parsers.event_writer import CallIdFactory, EventWriter
from remora.deployments.parsers.events import Reasoning, ReplyEvent, ReplyParser, Text
from remora.deployments.parsers.reasoning import ReasoningSplitter, SplitText
from remora.deployments.parsers.response_template import (
    CheckpointFormat,
    Part,
    PartFinder,
    PartKind,
)
from remora.deployments.parsers.tool_calls.faults import CallFault, FaultCallback, ignore_fault


class ReasoningAwareParser(ReplyParser, Protocol):
    """A parser that knows where the reasoning was."""

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """Ranges [start, end) of the raw text's characters that are reasoning, tags included."""
        ...


class ReplyReader:
    """A `ReplyParser` that also counts reasoning tokens.

    text_of_token:  a token's bytes in the reply's text; empty for hidden tokens
    """

    def __init__(self, parser: ReasoningAwareParser, text_of_token: Callable[[int], bytes]) -> None:
        self._parser = parser
        self._text_of_token = text_of_token
        self.push = parser.push
        self.finish = parser.finish

    def num_reasoning_tokens(self, token_ids: Iterable[int]) -> int:
        """Return how many of the reply's tokens so far begin within its reasoning."""
        spans = self._parser.reasoning_spans
        if not spans:
            return 0
        offsets = _char_offsets(map(self._text_of_token, token_ids))
        within = itertools.takewhile(lambda offset: offset < spans[-1][1], offsets)
        if len(spans) == 1 and spans[0][0] == 0:
            return sum(1 for _ in within)
        return sum(any(start <= offset < end for start, end in spans) for offset in within)


def _char_offsets(texts: Iterable[bytes]) -> Iterable[int]:
    """Yield the character at which each text begins."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offset = 0
    for text in texts:
        yield offset
        offset += len(decoder.decode(text))


class _ReasoningBuffer:
    """Emits reasoning at once, or in one piece when it ends."""

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
    """Reads a reply that may begin with reasoning. A `ReplyParser`.

    after:     parses the rest; None = the rest is text
    separate:  whether reasoning is separate, or stays in the text with its tags
    stream:    whether reasoning is streamed, or emitted whole at its end
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
        """Ranges [start, end) of the raw text's characters that are reasoning, tags included."""
        return ((0, self._num_chars),) if self._num_chars else ()

    def push(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of text; return the events that are certain now."""
        if self._splitter.is_over:  # what was held back has been emitted with the first of this
            if self._after:
                return self._after.push(text)
            return [Text(text)] if text else []
        pieces = self._splitter.push(text)
        if len(pieces) == 1:
            return self._read(pieces[0])
        return [event for piece in pieces for event in self._read(piece)]

    def finish(self) -> list[ReplyEvent]:
        """Return what was held back. Nothing may be pushed afterwards."""
        events = [event for piece in self._splitter.finish() for event in self._read(piece)]
        events += self._reasoning.end()
        return events + (self._after.finish() if self._after else [])

    def _read(self, piece: SplitText) -> list[ReplyEvent]:
        shown = piece.text if self._separate else piece.raw
        if piece.is_reasoning:
            self._num_chars += len(piece.raw)
            if self._separate:
                return self._reasoning.add(shown)
            return [Text(shown)] if shown else []
        events = self._reasoning.end()
        if self._after and shown:
            return events + self._after.push(shown)
        return [*events, Text(shown)] if shown else events


class _Stripper:
    """Removes the blanks at both ends of a streamed text; `gap` separates two texts."""

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
    """Reads a reply by the checkpoint's response template. A `ReplyParser`.

    tools:     in OpenAI's form; None = do not look for calls
    after:     parses the text of replies constrained to calls; None = the text is the answer
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
        self._strippers = {PartKind.TEXT: _Stripper(), PartKind.REASONING: _Stripper()}
        self._call: list[str] = []
        self._num_chars = 0
        self.reasoning_spans: list[tuple[int, int]] = []

    def push(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of text; return the events that are certain now."""
        events = [event for part in self._finder.push(text) for event in self._read(part)]
        return events + self._writer.drain()

    def finish(self) -> list[ReplyEvent]:
        """Return what was held back. Nothing may be pushed afterwards."""
        events = [event for part in self._finder.finish() for event in self._read(part)]
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
            return self._emit_text(part.text)
        if part.kind is PartKind.TEXT and not part.is_mark:
            return self._emit_text(self._strippers[part.kind].add(part.text))
        return []

    def _note_reasoning(self, start: int) -> None:
        if self.reasoning_spans and self.reasoning_spans[-1][1] == start:
            start = self.reasoning_spans.pop()[0]
        if self._num_chars > start:
            self.reasoning_spans.append((start, self._num_chars))

    def _read_reasoning(self, part: Part) -> list[ReplyEvent]:
        if not self._separate:
            return self._emit_text(part.text)
        events = self._writer.drain()
        if not part.is_mark:
            events += self._reasoning.add(self._strippers[part.kind].add(part.text))
        if part.ends:
            self._strippers[part.kind].gap()
            events += self._reasoning.end()
        return events

    def _read_call(self, part: Part) -> list[ReplyEvent]:
        if self._tools is None:
            return self._emit_text(part.text)
        self._call.append(part.text)
        if not part.ends:
            return []
        text = "".join(self._call)
        self._call.clear()
        calls = self._form.read_calls(text, self._tools)
        if calls is None:
            self._note(CallFault.MALFORMED)
            return self._emit_text(text)
        for name, arguments in calls:
            if not any(tool["function"]["name"] == name for tool in self._tools):
                self._note(CallFault.UNKNOWN_TOOL)
            self._writer.begin(name)
            self._writer.arguments(arguments)
            self._writer.complete()
        return []

    def _emit_text(self, text: str) -> list[ReplyEvent]:
        if self._after is not None:
            return self._writer.drain() + (self._after.push(text) if text else [])
        self._writer.text(text)
        return []
