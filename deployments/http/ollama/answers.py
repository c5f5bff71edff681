"""Answers to Ollama's /api/chat and /api/generate, written from the replies of a chat.

A tool call is told once it is whole, with its arguments as an object. Times are in nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.wire import parse_json
from remora.deployments.http.generation.logprobs import LogprobWriter
from remora.deployments.http.generation.reply import TOOL_CALLS, Call, Replies, Reply, ReplyPiece
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.ollama.bodies import OllamaBody
from remora.deployments.parsers.events import CallArguments, CallBegun, Reasoning, Text
from remora.engine.types import FinishReason, Request

_UNLOAD = (0, 0.0, "0", "0s")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaJob:
    """One validated request.

    is_chat:     whether an answer has a `message`; else it has a `response`
    requests:    one; none where only the model was to be loaded
    started_ns:  when the request came, on the monotonic clock
    """

    body: OllamaBody
    rid: str
    model: str
    is_chat: bool
    requests: tuple[Request, ...]
    replies: Callable[[], Replies]
    writer: LogprobWriter
    started_ns: int

    @property
    def streams(self) -> bool:
        """Whether the client wants chunks."""
        return self.body.streams

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the whole answer."""
        if not self.requests:
            return self._loaded()
        first_ns = time.monotonic_ns()
        (reply,) = await self.replies().gather(outputs)
        texts = [reply.text or ""]
        calls: list[dict[str, Any]] = []
        for call in reply.calls:
            written = _call(call, len(calls))
            if written is None:
                texts.append(call.arguments)
            else:
                calls.append(written)
        answer = self._line("".join(texts), thought=reply.thought, calls=calls)
        if self.body.logprobs:
            answer["logprobs"] = self.writer.chat(reply.logprobs)["content"]
        return answer | self._ending(reply, first_ns)

    async def chunks(self, outputs: OutputStream) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer piece by piece, and then how it ended."""
        if not self.requests:
            yield self._loaded()
            return
        first_ns = time.monotonic_ns()
        told, replies = _Told(), self.replies()
        async for _, output in outputs:
            piece = replies.add(output)
            lines = self._lines(piece, told)
            if self.body.logprobs and piece.output.logprobs:
                lines = lines or [self._line("")]
                lines[0]["logprobs"] = self.writer.chat(piece.output.logprobs)["content"]
            for line in lines:
                yield line | {"done": False}
            if piece.finish_reason is not None:
                yield self._line("") | self._ending(piece.reply, first_ns)

    def _lines(self, piece: ReplyPiece, told: _Told) -> list[dict[str, Any]]:
        """Return what one output of the engine adds."""
        lines = []
        for event in piece.events:
            match event:
                case CallArguments():
                    continue
                case CallBegun(number):
                    lines += self._calls(piece.reply, told, up_to=number)
                    told.num_begun = number + 1
                case Text(text):
                    lines += [*self._calls(piece.reply, told), self._line(text)]
                case Reasoning(text):
                    lines += [*self._calls(piece.reply, told), self._line("", thought=text)]
        if piece.finish_reason is not None:
            lines += self._calls(piece.reply, told)
        return lines

    def _calls(
        self, reply: Reply, told: _Told, *, up_to: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the calls that are whole and have not been told."""
        whole = reply.calls[told.num_told : told.num_begun if up_to is None else up_to]
        told.num_told += len(whole)
        lines = []
        for call in whole:
            written = _call(call, told.num_written)
            told.num_written += written is not None
            lines.append(
                self._line(call.arguments) if written is None else self._line("", calls=[written])
            )
        return lines

    def _line(
        self, text: str, *, thought: str | None = None, calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self.model, "created_at": _now()}
        says: dict[str, Any] = {} if thought is None else {"thinking": thought}
        if self.is_chat:
            if calls:
                says["tool_calls"] = calls
            line["message"] = {"role": "assistant", "content": text, **says}
            return line
        return line | {"response": text, **says}

    def _ending(self, reply: Reply, first_ns: int) -> dict[str, Any]:
        now_ns = time.monotonic_ns()
        reason = reply.finish_reason
        return {
            "done": True,
            "done_reason": FinishReason.STOP.value if reason == TOOL_CALLS else reason,
            "total_duration": now_ns - self.started_ns,
            "load_duration": 0,
            "prompt_eval_count": len(self.requests[0].prompt_ids),
            "prompt_eval_duration": first_ns - self.started_ns,
            "eval_count": reply.num_output_tokens,
            "eval_duration": max(1, now_ns - first_ns),
        }

    def _loaded(self) -> dict[str, Any]:
        """Return the answer to a body that asks for nothing but the model's presence."""
        reason = "unload" if self.body.keep_alive in _UNLOAD else "load"
        return self._line("") | {"done": True, "done_reason": reason}


@dataclass(slots=True, eq=False)
class _Told:
    """How far a stream has come with the calls of its reply."""

    num_begun: int = 0
    num_told: int = 0
    num_written: int = 0


def _call(call: Call, index: int) -> dict[str, Any] | None:
    """Return a call in Ollama's shape; None if its arguments were cut off and are no object."""
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
