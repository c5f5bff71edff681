"""Replies of a chat: from the engine's outputs to text, thought and tool calls, in no dialect.

Each chat-like endpoint (OpenAI's chat and responses, Anthropic's messages, Ollama's chat) reads
replies here and writes them in its own way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.parsers.events import (
    CallArguments,
    CallBegun,
    Reasoning,
    ReplyEvent,
    ReplyParser,
    Text,
)
from remora.deployments.parsers.reply_reader import ReplyReader
from remora.engine.types import FinishReason, Output, TokenLogprob

TOOL_CALLS = "tool_calls"

ParserMaker = Callable[[], ReplyParser | None]


@dataclass(slots=True, eq=False)
class Call:
    """One tool call. `arguments` is JSON text, as the model wrote it; it comes in pieces."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """Its arguments, as far as they have come."""
        return "".join(self.pieces)


@dataclass(slots=True, eq=False)
class Reply:
    """One of the n replies, as far as it has come.

    texts, thoughts:     the pieces of the answer and of the thought before it
    num_reasoning_tokens:  told once the reply has ended
    finish_reason:       stop, length, abort, or tool_calls: the model has ended by calling tools
    """

    index: int
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0

    @property
    def text(self) -> str | None:
        """The answer; None until the model has written some."""
        return "".join(self.texts) if self.texts else None

    @property
    def thought(self) -> str | None:
        """The thought; None until the model has written some."""
        return "".join(self.thoughts) if self.thoughts else None


# Not frozen: that would cost a microsecond for each token of each stream.
@dataclass(slots=True, kw_only=True, eq=False)
class ReplyPiece:
    """What one output of the engine adds to a reply.

    begins:         whether it is the reply's first
    events:         in order; pieces of text may lag behind `output.token_ids`
    reply:          the reply with this piece added
    finish_reason:  set on the last piece of a reply, and only there
    """

    begins: bool
    events: tuple[ReplyEvent, ...]
    output: Output
    reply: Reply
    finish_reason: str | None


class Replies:
    """All replies of one call.

    make_parser:   called once for each reply; None = all its text is the answer
    counts_calls:  whether calls make the finish reason `tool_calls`
    """

    def __init__(self, n: int, make_parser: ParserMaker, *, counts_calls: bool = True) -> None:
        self.all = [Reply(index) for index in range(n)]
        self._parsers = [make_parser() for _ in range(n)]
        self._begun: set[int] = set()
        self._counts_calls = counts_calls

    async def gather(self, outputs: OutputStream) -> list[Reply]:
        """Return the whole replies."""
        async for _, output in outputs:
            self.add(output)
        return self.all

    def add(self, output: Output) -> ReplyPiece:
        """Take in one output, and return what it means."""
        reply = self.all[output.index]
        begins = output.index not in self._begun
        self._begun.add(output.index)
        reply.token_ids += output.token_ids
        reply.logprobs += output.logprobs or ()
        reply.prompt_logprobs = output.prompt_logprobs or reply.prompt_logprobs
        reply.stop_reason = output.stop_reason
        reply.num_output_tokens = output.num_output_tokens
        reply.num_cached_tokens = output.num_cached_tokens
        events = self._events(output)
        for event in events:
            _apply(reply, event)
        if output.finish_reason is not None:
            reply.finish_reason = self._finish_reason(reply, output.finish_reason)
            parser = self._parsers[output.index]
            if isinstance(parser, ReplyReader):
                reply.num_reasoning_tokens = parser.num_reasoning_tokens(reply.token_ids)
        return ReplyPiece(
            begins=begins,
            events=tuple(events),
            output=output,
            reply=reply,
            finish_reason=reply.finish_reason,
        )

    def usage(self, num_prompt_tokens: int) -> dict[str, Any]:
        """Return OpenAI's usage object; the prompt counts once, whatever n."""
        num_output = sum(reply.num_output_tokens for reply in self.all)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output,
            "total_tokens": num_prompt_tokens + num_output,
            "prompt_tokens_details": {"cached_tokens": self.all[0].num_cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": sum(reply.num_reasoning_tokens for reply in self.all)
            },
        }

    def _events(self, output: Output) -> list[ReplyEvent]:
        parser = self._parsers[output.index]
        if parser is None:
            return [Text(output.text)] if output.text else []
        events = parser.push(output.text) if output.text else []
        return events if output.finish_reason is None else events + parser.finish()

    def _finish_reason(self, reply: Reply, reason: FinishReason) -> str:
        if reason is FinishReason.STOP and reply.calls and self._counts_calls:
            return TOOL_CALLS
        return reason.value


def _apply(reply: Reply, event: ReplyEvent) -> None:
    match event:
        case Text(text):
            reply.texts.append(text)
        case Reasoning(text):
            reply.thoughts.append(text)
        case CallBegun(_, call_id, name):
            reply.calls.append(Call(call_id, name))
        case CallArguments(number, text):
            reply.calls[number].pieces.append(text)
