"""Responses of Ollama's /api/chat and /api/generate, written from the replies of a chat.

A tool call is written once it is complete, with its arguments as an object. Times are in
nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.sse import Chunk, ChunkWriter
from remora.deployments.http.core.wire import parse_json
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.logprobs import LogprobWriter
from remora.deployments.http.generation.replies import Replies, Reply, ToolCall
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.ollama.bodies import OllamaBody
from remora.deployments.parsers.events import CallArguments, CallBegun, Reasoning, ReplyEvent, Text
from remora.engine.types import Output

_UNLOAD = (0, 0.0, "0", "0s")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaJob(Job):
    """A checked request; without engine requests, it only loads or unloads the model.

    is_chat:        whether a response has a `message` instead of a `response`
    shows_context:  whether the last line holds the tokens of prompt and answer
    ready_ns:       when it was ready for the engine, on the monotonic clock
    """

    body: OllamaBody
    model: str
    is_chat: bool
    replies: Callable[[], Replies]
    logprobs: LogprobWriter
    ready_ns: int
    shows_context: bool = False

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the whole response."""
        if not self.requests:
            return self.loaded()
        first_ns = time.monotonic_ns()
        (reply,) = await self.replies().gather(outputs)
        texts = [reply.text]
        calls: list[dict[str, Any]] = []
        for call in reply.calls:
            written = _call(call, len(calls))
            if written is None:
                texts.append(call.arguments)
            else:
                calls.append(written)
        reasoning = "".join(reply.reasoning) if reply.reasoning else None
        answer = self.line("".join(texts), reasoning=reasoning, calls=calls)
        if self.body.logprobs:
            answer["logprobs"] = self.logprobs.chat(reply.logprobs)["content"]
        return answer | self.ending(reply, first_ns)

    def writer(self) -> OllamaWriter:
        """Return the writer of a streamed response."""
        return OllamaWriter(self)

    def line(
        self, text: str, *, reasoning: str | None = None, calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return a response, or a line of a streamed one, without its final fields."""
        line: dict[str, Any] = {"model": self.model, "created_at": _now()}
        fields: dict[str, Any] = {} if reasoning is None else {"thinking": reasoning}
        if not self.is_chat:
            return line | {"response": text, **fields}
        if calls:
            fields["tool_calls"] = calls
        return line | {"message": {"role": "assistant", "content": text, **fields}}

    def ending(self, reply: Reply, first_ns: int) -> dict[str, Any]:
        """Return the finish reason of a reply, and the times and counts of the request."""
        now_ns, prompt_ids = time.monotonic_ns(), self.requests[0].prompt_ids
        context = {"context": [*prompt_ids, *reply.token_ids]} if self.shows_context else {}
        return {
            "done": True,
            "done_reason": reply.finish_reason,
            **context,
            "total_duration": now_ns - self.context.started_ns,
            # The model is in memory: all that precedes its work is this preparation.
            "load_duration": max(1, self.ready_ns - self.context.started_ns),
            "prompt_eval_count": len(prompt_ids),
            "prompt_eval_duration": max(1, first_ns - self.ready_ns),
            "eval_count": reply.num_output_tokens,
            "eval_duration": max(1, now_ns - first_ns),
        }

    def loaded(self) -> dict[str, Any]:
        """Return the response to a body that only loads or unloads the model."""
        reason = "unload" if self.body.keep_alive in _UNLOAD else "load"
        return self.line("") | {"done": True, "done_reason": reason}


class OllamaWriter(ChunkWriter):
    """Writes a streamed response: lines, then the final fields.

    _num_begun:    tool calls that have begun
    _num_taken:    complete tool calls that are written, as calls or as text
    _num_written:  tool calls written as calls
    """

    def __init__(self, job: OllamaJob) -> None:
        self._job = job
        self._replies = job.replies()
        self._first_ns = time.monotonic_ns()
        self._num_begun = self._num_taken = self._num_written = 0

    def begin(self) -> Sequence[Chunk]:
        """Return the only line of a request that generates nothing."""
        return () if self._job.requests else (self._job.loaded(),)

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the lines of one output."""
        job, reply = self._job, self._replies.of(prompt, output)
        lines = self._lines(reply, reply.add(output))
        if output.finish_reason is not None:
            lines += self._calls(reply)
        if job.body.logprobs and output.logprobs:
            lines = lines or [job.line("")]
            lines[0]["logprobs"] = job.logprobs.chat(output.logprobs)["content"]
        lines = [line | {"done": False} for line in lines]
        if output.finish_reason is not None:
            lines.append(job.line("") | job.ending(reply, self._first_ns))
        return lines

    def _lines(self, reply: Reply, events: Iterable[ReplyEvent]) -> list[Chunk]:
        lines, line = [], self._job.line
        for event in events:
            match event:
                case CallArguments():
                    continue
                case CallBegun(number):
                    lines += self._calls(reply, up_to=number)
                    self._num_begun = number + 1
                case Text(text):
                    lines += [*self._calls(reply), line(text)]
                case Reasoning(text):
                    lines += [*self._calls(reply), line("", reasoning=text)]
        return lines

    def _calls(self, reply: Reply, *, up_to: int | None = None) -> list[Chunk]:
        """Return the lines of complete calls that are not written yet."""
        whole = reply.calls[self._num_taken : self._num_begun if up_to is None else up_to]
        self._num_taken += len(whole)
        lines = []
        for call in whole:
            written = _call(call, self._num_written)
            self._num_written += written is not None
            line = self._job.line
            lines.append(line(call.arguments) if written is None else line("", calls=[written]))
        return lines


def _call(call: ToolCall, index: int) -> dict[str, Any] | None:
    """Return a call in Ollama's format; None if its arguments are cut off or not an object."""
    try:
        arguments = parse_json((call.arguments or "{}").encode("utf-8", "replace"))
    except InvalidRequest:
        return None
    if not isinstance(arguments, dict):
        return None
    function = {"index": index, "name": call.name, "arguments": arguments}
    return {"id": call.id, "function": function}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
