"""gpt-oss: replies made of messages, each with a header that states its kind.

    <|channel|>analysis<|message|>...<|end|>                       reasoning
    <|start|>assistant<|channel|>commentary to=functions.add
        <|constrain|>json<|message|>{"a": 1}<|call|>               a call
    <|start|>assistant<|channel|>final<|message|>...<|return|>     the answer

The prompt ends with `<|start|>assistant`. The recipient, `to=...`, may also precede the channel.
A commentary without a recipient addresses the user before a call, so it is text. A grammar
constrains the answer only: calls are messages before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from remora.deployments.parsers.event_writer import CallIdFactory, EventWriter
from remora.deployments.parsers.events import Reasoning, ReplyEvent, ReplyParser
from remora.deployments.parsers.nested_values import json_brackets, read_nested
from remora.deployments.parsers.text_reader import BLANKS, Malformed, Markers, Steps, TextReader
from remora.deployments.parsers.tool_calls.faults import CallFault, FaultCallback, ignore_fault
from remora.deployments.parsers.tools import ToolUse

NAMES = ("gpt-oss", "gpt_oss", "openai", "harmony")
_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
CALL_END = "<|call|>"
_ENDS = ("<|end|>", "<|return|>", CALL_END)
_MARKS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
_REPLY = f"{_START}assistant"
_REASONING = f"{_CHANNEL}analysis{_MESSAGE}"
_ANSWER = f"<|end|>{_REPLY}{_CHANNEL}final{_MESSAGE}"
_IN_BODY = Markers(_START, _CHANNEL, *_ENDS)
_IN_HEADER = Markers(_START, _MESSAGE, *_ENDS)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ANALYSIS = re.compile(re.escape(_CHANNEL) + r"\s*analysis\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyFormat:
    """gpt-oss's notation of reasoning, calls and answers.

    has_calls:      whether calls are parsed, or are text
    has_reasoning:  whether reasoning is separate, or is text
    """

    name: ClassVar[str] = NAMES[0]
    has_calls: bool = True
    has_reasoning: bool = True

    def names_mark(self, text: str) -> bool:
        """Return whether a text is a mark."""
        return text in _MARKS

    def reasoning_end(self, prompt: str) -> str | None:
        """Return the text between reasoning and answer, if the prompt ends within reasoning."""
        opened = prompt.rfind(_REASONING)
        is_open = opened >= 0 and not any(prompt.find(end, opened) >= 0 for end in _ENDS)
        return _ANSWER if is_open else None

    def reasoning_opening(self, prompt: str) -> str | None:
        """Return the text that opens reasoning, if the reply to a prompt may begin with it."""
        return _REASONING if prompt.endswith(_REPLY) else None


class HarmonyReader:
    """Reads one reply. A `ReplyParser` that knows where the reasoning was."""

    def __init__(
        self,
        form: HarmonyFormat,
        prompt: str,
        *,
        use: ToolUse | None,
        after: ReplyParser | None,
        make_id: CallIdFactory,
        separate: bool = True,
        stream: bool = True,
        note: FaultCallback = ignore_fault,
    ) -> None:
        """Read the reply to one prompt.

        use:       tools that may be called; None = calls are text
        after:     parses the text of replies constrained to calls; None = the text is the answer
        separate:  whether reasoning is separate, or stays in the text with its marks
        stream:    whether reasoning is streamed, or emitted message by message
        """
        self.reasoning_spans: list[tuple[int, int]] = []
        self._reader = TextReader()
        self._writer = EventWriter(make_id, parallel=use is None or use.parallel)
        self._names = frozenset(tool.name for tool in use.tools) if use else None
        self._after, self._stream, self._note = after, stream, note
        self._separate = separate and form.has_reasoning
        self._counts = form.has_reasoning  # whether `reasoning_spans` is recorded
        self._events: list[ReplyEvent] = []
        self._reasoning: list[str] = []
        self._steps = self._read_reply(is_within=form.reasoning_end(prompt) is not None)

    def push(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of text; return the events that are certain now."""
        self._reader.feed(text)
        next(self._steps, None)
        if self._stream:
            self._emit_reasoning()
        return self._drain()

    def finish(self) -> list[ReplyEvent]:
        """Return what was held back. Nothing may be pushed afterwards."""
        self._reader.end()
        next(self._steps, None)
        self._emit_reasoning()
        events = [*self._drain(), *self._writer.finish()]
        return events + (self._after.finish() if self._after else [])

    def _read_reply(self, *, is_within: bool) -> Steps[None]:
        reader = self._reader
        if is_within:
            mark = yield from self._read_reasoning("", 0)
        else:
            mark = yield from reader.until(_IN_BODY, self._emit_text)
        while mark is not None:
            if mark in _ENDS:
                mark = yield from reader.until(_IN_BODY, self._emit_text)
            else:
                mark = yield from self._read_message(mark)

    def _read_message(self, mark: str) -> Steps[str | None]:
        """Read a message whose header begins with `mark`; return the mark that ends it."""
        reader, header, start = self._reader, [mark], self._reader.num_read - len(mark)
        stop = yield from reader.until(_IN_HEADER, header.append)
        header_text = "".join(header)
        if stop != _MESSAGE:
            self._emit_text(header_text)
            return stop
        recipient = _RECIPIENT.search(header_text)
        if recipient and self._names is not None:
            return (yield from self._read_call(recipient[1]))
        if _ANALYSIS.search(header_text) and not recipient:
            return (yield from self._read_reasoning(header_text + _MESSAGE, start))
        return (yield from reader.until(_IN_BODY, self._emit_text))

    def _read_reasoning(self, header: str, start: int) -> Steps[str | None]:
        """Read reasoning after its header; return the mark that ends it."""
        if not self._separate:
            self._emit_text(header)
        elif self.reasoning_spans:
            self._reasoning.append("\n")
        if self._counts:
            self.reasoning_spans.append((start, self._reader.num_read))
        end = yield from self._reader.until(_IN_BODY, self._add_reasoning)
        if end in _ENDS:
            self._add_reasoning("" if self._separate else end)
        self._emit_reasoning()
        return end

    def _read_call(self, name: str) -> Steps[str | None]:
        """Read a call's arguments; return the mark that ends them."""
        reader, writer = self._reader, self._writer
        if self._names is not None and name not in self._names:
            self._note(CallFault.UNKNOWN_TOOL)
        writer.begin(name)
        yield from reader.run(BLANKS)
        if not (yield from reader.sees("{")):
            end = yield from reader.until(_IN_BODY, writer.arguments)
            self._note(CallFault.UNFINISHED if end is None else CallFault.MALFORMED)
            return end
        try:
            yield from read_nested(reader, writer.arguments, _BRACKETS)
        except Malformed as error:
            self._note(CallFault.MALFORMED if error.marker else CallFault.UNFINISHED)
            return error.marker or None
        return (yield from reader.until(_IN_BODY, self._emit_text))

    def _emit_text(self, text: str) -> None:
        if self._after is not None:
            self._events += self._writer.drain() + self._after.push(text)
        else:
            self._writer.text(text)

    def _add_reasoning(self, text: str) -> None:
        if self._counts:
            self.reasoning_spans[-1] = (self.reasoning_spans[-1][0], self._reader.num_read)
        if self._separate:
            self._reasoning.append(text)
        else:
            self._emit_text(text)

    def _emit_reasoning(self) -> None:
        text = "".join(self._reasoning)
        self._reasoning.clear()
        if text:
            self._events += [*self._writer.drain(), Reasoning(text)]

    def _drain(self) -> list[ReplyEvent]:
        events = [*self._events, *self._writer.drain()]
        self._events.clear()
        return events


_BRACKETS = json_brackets(*_IN_BODY.texts)
