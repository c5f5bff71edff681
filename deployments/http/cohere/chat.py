"""Cohere's /v2/chat: turns a body into a job, and outputs into messages and events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remora.deployments.http.cohere.chat_bodies import NAMES, CohereChatBody, chat_body
from remora.deployments.http.cohere.events import CohereWriter
from remora.deployments.http.core.field_names import in_callers_words
from remora.deployments.http.core.sse import Chunk, ChunkWriter
from remora.deployments.http.generation.chat import PreparedChat, prepare_chat
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.replies import Reply
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.engine.types import FinishReason, Output


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereChatJob(Job):
    """A validated chat request."""

    chat: PreparedChat

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the whole response."""
        replies, writer = self.chat.replies(), CohereWriter()
        async for prompt, output in outputs:
            writer.take(replies.of(prompt, output).add(output))
        reply = replies.all[0]
        answer = {
            "id": self.context.request_id,
            "message": writer.message,
            **_end(self.chat, reply, writer),
        }
        if self.chat.body.logprobs:
            answer["logprobs"] = [
                {
                    "text": self.chat.logprobs.token(line.token_id),
                    "token_ids": [line.token_id],
                    "logprobs": [line.logprob],
                }
                for line in reply.logprobs
                if line is not None
            ]
        return answer

    def writer(self) -> CohereChatWriter:
        """Return the writer of the streamed response."""
        return CohereChatWriter(self.chat)


class CohereChatWriter(ChunkWriter):
    """Writes a reply as events."""

    def __init__(self, chat: PreparedChat) -> None:
        self._chat = chat
        self._replies = chat.replies()
        self._writer = CohereWriter()

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the events of one output."""
        reply = self._replies.of(prompt, output)
        begins = not reply.has_begun
        events = self._writer.take(reply.add(output))
        return [self._start(), *events] if begins else events

    async def end(self) -> Sequence[Chunk]:
        """Return the last events, with the finish reason and the usage."""
        last = self._writer.finish()
        delta = _end(self._chat, self._replies.all[0], self._writer)
        return [*last, {"type": "message-end", "delta": delta}]

    def _start(self) -> Chunk:
        message = {
            "role": "assistant",
            "content": [],
            "tool_plan": "",
            "tool_calls": [],
            "citations": [],
        }
        return {
            "type": "message-start",
            "id": self._chat.context.request_id,
            "delta": {"message": message},
        }


def _end(chat: PreparedChat, reply: Reply, writer: CohereWriter) -> dict[str, Any]:
    """Return the finish reason and the usage."""
    tokens = {"input_tokens": len(chat.prompt_ids), "output_tokens": reply.num_output_tokens}
    return {
        "finish_reason": _finish_reason(reply, writer),
        "usage": {
            "billed_units": tokens,
            "tokens": tokens,
            "cached_tokens": reply.num_cached_tokens,
        },
    }


def _finish_reason(reply: Reply, writer: CohereWriter) -> str:
    """Return Cohere's finish reason; an aborted reply has that of an error."""
    if reply.finish_reason is FinishReason.ABORT:
        return "ERROR"
    if reply.finish_reason is FinishReason.LENGTH:
        return "MAX_TOKENS"
    if writer.calls:
        return "TOOL_CALL"
    return "STOP_SEQUENCE" if isinstance(reply.stop_reason, str) else "COMPLETE"


async def prepare_cohere_chat(
    server: ServerState, body: CohereChatBody, context: RequestContext
) -> CohereChatJob:
    """Return the job of a body after all checks that need no engine. Raises RequestError."""
    chat = chat_body(
        body,
        server.tokenizer.template_variables,
        lowest_first=server.plan.low_priority_first,
    )
    with in_callers_words(NAMES):
        prepared = await prepare_chat(server, chat, context)
    return CohereChatJob(
        context=context,
        requests=(prepared.request,),
        streams=bool(body.stream),
        chat=prepared,
    )
