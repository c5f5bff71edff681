"""The replies of a request so far: text, reasoning, tool calls, tokens and usage.

Every API collects the engine's outputs here and formats the replies itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from remora.deployments.observing.reply_clock import ReplyClock
from remora.deployments.parsers.events import (
    CallArguments,
    CallBegun,
    Reasoning,
    ReplyEvent,
    ReplyParser,
    Text,
)
from remora.deployments.parsers.replies import ParserFactory
from remora.deployments.parsers.reply_reader import ReplyReader
from remora.engine.spec.counts import NONE_VERIFIED, DraftCounts
from remora.engine.types import FinishReason, FloatArray, Output, TokenLogprob

TOOL_CALLS = "tool_calls"

ItemT = TypeVar("ItemT")


@dataclass(slots=True, eq=False)
class ToolCall:
    """One tool call. `arguments` is JSON text as the model wrote it; it arrives in pieces."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """The arguments so far."""
        return "".join(self.pieces)


@dataclass(slots=True, eq=False)
class Reply:
    """One reply so far: sequence `index` of the n of prompt `prompt`.

    parser:                None = all text is the answer
    counts_calls:          whether a reply that stops after tool calls ends with `tool_calls`
    texts, reasoning:      pieces of the answer, and of the reasoning before it
    num_reasoning_tokens:  set at the end of the reply
    drafts:                verified drafts so far
    predicted:             tokens of the prediction that became output, and that did not
    score:                 by which outputs of a beam search are ranked
    written:               log-probabilities in an API's format so far, by field name
    """

    prompt: int
    index: int
    parser: ReplyParser | None = None
    counts_calls: bool = True
    has_begun: bool = False
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    hidden_states: FloatArray | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    drafts: DraftCounts = NONE_VERIFIED
    predicted: tuple[int, int] = (0, 0)
    score: float | None = None
    written: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self.texts)

    @property
    def reason(self) -> str | None:
        """`finish_reason`, or `tool_calls` for a reply that stopped after calling tools."""
        reason = self.finish_reason
        if reason is FinishReason.STOP and self.calls and self.counts_calls:
            return TOOL_CALLS
        return None if reason is None else reason.value

    def add(self, output: Output) -> list[ReplyEvent]:
        """Append one output and return its events; text may lag behind the tokens."""
        self.has_begun = True
        self.token_ids += output.token_ids
        self.num_output_tokens = output.num_output_tokens
        self.num_cached_tokens = output.num_cached_tokens
        self.stop_reason = output.stop_reason
        self.drafts = output.drafts
        self.predicted, self.score = output.predicted, output.score
        if output.logprobs:
            self.logprobs += output.logprobs
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        if output.hidden_states is not None:
            self.hidden_states = output.hidden_states
        text, parser = output.text, self.parser
        if parser is None:
            events: list[ReplyEvent] = [Text(text)] if text else []
        else:
            events = parser.push(text) if text else []
            if output.finish_reason is not None:
                events = events + parser.finish()
        for event in events:
            self._apply(event)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            if isinstance(parser, ReplyReader):
                self.num_reasoning_tokens = parser.num_reasoning_tokens(self.token_ids)
        return events

    def _apply(self, event: ReplyEvent) -> None:
        if isinstance(event, Text):
            self.texts.append(event.text)
        elif isinstance(event, Reasoning):
            self.reasoning.append(event.text)
        elif isinstance(event, CallArguments):
            self.calls[event.number].pieces.append(event.text)
        elif isinstance(event, CallBegun):
            self.calls.append(ToolCall(event.id, event.name))


class Replies:
    """All replies of a request, ordered by prompt.

    make_parser:  called once for each reply; None = all text is the answer
    """

    def __init__(
        self,
        num_prompts: int = 1,
        n: int = 1,
        make_parser: ParserFactory = lambda: None,
        *,
        counts_calls: bool = True,
    ) -> None:
        self._n = n
        self.all = [
            Reply(prompt, index, make_parser(), counts_calls)
            for prompt in range(num_prompts)
            for index in range(n)
        ]

    def __iter__(self) -> Iterator[Reply]:
        return iter(self.all)

    def of(self, prompt: int, output: Output) -> Reply:
        """Return the reply that an output belongs to."""
        return self.all[prompt * self._n + output.index]

    def add(self, prompt: int, output: Output) -> Reply:
        """Append an output to its reply, and return the reply."""
        reply = self.of(prompt, output)
        reply.add(output)
        return reply

    async def gather(
        self, outputs: AsyncIterable[tuple[int, Output]], clock: ReplyClock | None = None
    ) -> list[Reply]:
        """Append all outputs until the request ends, and return the replies.

        clock:  notes the outputs
        """
        async for prompt, output in outputs:
            if clock is not None:
                clock.note(output)
            self.add(prompt, output)
        return self.all

    def number(self, reply: Reply) -> int:
        """Return the index of a reply in the response."""
        return reply.prompt * self._n + reply.index

    async def each(self) -> AsyncGenerator[Reply, None]:
        """Yield all replies; other requests run in between, since writing one may take long."""
        async for reply in with_pauses(self.all):
            yield reply

    def best(self, n: int) -> list[Reply]:
        """Return the n replies to each prompt with the highest mean log-probability, best first."""
        if n == self._n:
            return self.all
        groups = (self.all[at : at + self._n] for at in range(0, len(self.all), self._n))
        ranked = (sorted(group, key=_mean_logprob, reverse=True) for group in groups)
        return [reply for group in ranked for reply in group[:n]]

    def prompt_logprobs(self, reply: Reply) -> tuple[TokenLogprob | None, ...] | None:
        """Return the log-probabilities of the reply's prompt, which arrive with index 0."""
        return self.all[reply.prompt * self._n].prompt_logprobs

    def usage(self, prompt_lens: Sequence[int]) -> dict[str, Any]:
        """Return OpenAI's usage object; each prompt counts once, whatever n is."""
        num_prompt = sum(prompt_lens)
        num_output = sum(reply.num_output_tokens for reply in self.all)
        num_cached = sum(reply.num_cached_tokens for reply in self.all[:: self._n])
        num_reasoning = sum(reply.num_reasoning_tokens for reply in self.all)
        details = {"reasoning_tokens": num_reasoning}
        right, wrong = (sum(reply.predicted[place] for reply in self.all) for place in (0, 1))
        if right or wrong:
            details |= {"accepted_prediction_tokens": right, "rejected_prediction_tokens": wrong}
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": details,
        }

    def metrics(self, clock: ReplyClock) -> dict[str, Any] | None:
        """Return vLLM's `metrics` of an answer with one reply; None for several."""
        if len(self.all) != 1:
            return None
        num_tokens, counts = self.all[0].num_output_tokens, self.all[0].drafts
        spent_ms = clock.prompt_ms + clock.output_ms
        metrics: dict[str, Any] = {
            "time_to_first_token_ms": clock.prompt_ms,
            "generation_time_ms": clock.output_ms,
            "queue_time_ms": clock.queue_ms,
            "mean_itl_ms": clock.output_ms / (num_tokens - 1) if num_tokens > 1 else None,
            "tokens_per_second": num_tokens * 1e3 / spent_ms if spent_ms else None,
        }
        if counts.num_rows:
            metrics["speculative_decoding"] = {
                "num_spec_steps": counts.num_rows,
                "num_draft_tokens": counts.num_drafts,
                "num_accepted_draft_tokens": counts.num_accepted,
                "mean_acceptance_length": counts.tokens_per_row,
                "draft_acceptance_rate": counts.acceptance_rate,
            }
        return metrics


def _mean_logprob(reply: Reply) -> float:
    entries = reply.logprobs
    return sum(entry.logprob for entry in entries) / len(entries) if entries else -math.inf


async def with_pauses(items: Iterable[ItemT]) -> AsyncGenerator[ItemT, None]:
    """Yield the items and let other tasks run after each one."""
    for item in items:
        yield item
        await asyncio.sleep(0)
