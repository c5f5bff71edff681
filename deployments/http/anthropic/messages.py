"""/v1/messages: turns a body into a job, and outputs into Anthropic's messages and events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from remora.deployments.http.anthropic.bodies import CountTokensBody, MessagesBody
from remora.deployments.http.anthropic.context_edits import edited
from remora.deployments.http.anthropic.events import TOOL_USE, BlockWriter
from remora.deployments.http.anthropic.to_chat import chat_body, renames_of
from remora.deployments.http.core.field_names import in_callers_words
from remora.deployments.http.core.fields import parse
from remora.deployments.http.core.sse import Chunk, ChunkWriter
from remora.deployments.http.core.wire import JSONAnswer, read_json
from remora.deployments.http.generation.chat import PreparedChat, prepare_chat
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.prompts import encode, render
from remora.deployments.http.generation.reasoning import EFFORT
from remora.deployments.http.generation.replies import Reply
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.engine.types import FinishReason, Output


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Fields of an answer that depend on the request alone.

    context:         the edits of the conversation, if the request asks for some
    omits_thinking:  whether reasoning is shown without its text
    """

    context: dict[str, Any]
    omits_thinking: bool

    def blocks(self) -> BlockWriter:
        """Return the writer of a reply."""
        return BlockWriter(omits_thinking=self.omits_thinking)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageJob(Job):
    """A validated message request.

    shown:  what the answer repeats of the request, and how it shows reasoning
    """

    chat: PreparedChat
    shown: Shown

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the complete answer."""
        replies, blocks = self.chat.replies(), self.shown.blocks()
        async for prompt, output in outputs:
            blocks.take(replies.of(prompt, output).add(output))
        blocks.finish()
        reply = replies.all[0]
        message = _message(self.chat, reply) | {"content": blocks.blocks}
        return message | _end(reply, blocks) | self.shown.context

    def writer(self) -> MessageWriter:
        """Return the writer of the streamed answer."""
        return MessageWriter(self.chat, self.shown)


class MessageWriter(ChunkWriter):
    """Writes a message as events."""

    def __init__(self, chat: PreparedChat, shown: Shown) -> None:
        self._chat = chat
        self._shown = shown
        self._replies = chat.replies()
        self._blocks = shown.blocks()

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the events of one output."""
        reply = self._replies.of(prompt, output)
        begins = not reply.has_begun
        events = self._blocks.take(reply.add(output))
        if not begins:
            return events
        return [{"type": "message_start", "message": _message(self._chat, reply)}, *events]

    async def end(self) -> Sequence[Chunk]:
        """Return the last events: the end of the last block, the stop reason and the usage."""
        reply, last = self._replies.all[0], self._blocks.finish()
        delta, usage = _end(reply, self._blocks), _usage(self._chat, reply)
        return [
            *last,
            {"type": "message_delta", "delta": delta, "usage": usage, **self._shown.context},
            {"type": "message_stop"},
        ]


def _message(chat: PreparedChat, reply: Reply) -> dict[str, Any]:
    """Return the message without content and stop reason."""
    return {
        "id": f"msg_{chat.context.request_id}",
        "type": "message",
        "role": "assistant",
        "model": chat.model.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(chat, reply),
    }


def _usage(chat: PreparedChat, reply: Reply) -> dict[str, Any]:
    """Return the usage so far; the prompt's tokens are the sum of cached and uncached tokens."""
    return {
        "input_tokens": len(chat.prompt_ids) - reply.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.num_cached_tokens,
        "output_tokens": reply.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": reply.num_reasoning_tokens},
    }


def _end(reply: Reply, writer: BlockWriter) -> dict[str, Any]:
    """Return the stop reason. An aborted reply has that of a reply cut off by a limit."""
    stop_sequence = None
    if reply.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT):
        reason = "max_tokens"
    elif any(block["type"] == TOOL_USE for block in writer.blocks):
        reason = "tool_use"
    elif isinstance(reply.stop_reason, str):
        reason, stop_sequence = "stop_sequence", reply.stop_reason
    else:
        reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": stop_sequence}


async def prepare_message(
    server: ServerState, body: MessagesBody, context: RequestContext
) -> MessageJob:
    """Return the job of a body after all checks that need no engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    body, applied = await edited(body, partial(_count, server))
    chat = chat_body(body, knows_efforts=_knows_efforts(server))
    with in_callers_words(renames_of(body)):
        prepared = await prepare_chat(server, chat, context)
    has_edits = body.context_management is not None
    shown = Shown(
        context={"context_management": {"applied_edits": applied}} if has_edits else {},
        omits_thinking=body.thinking is not None and body.thinking.display == "omitted",
    )
    return MessageJob(
        context=context,
        requests=(prepared.request,),
        streams=bool(body.stream),
        chat=prepared,
        shown=shown,
    )


async def count_tokens(server: ServerState, body: CountTokensBody) -> dict[str, Any]:
    """Return Anthropic's count of the prompt tokens of a body, after its edits.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    await server.model(body.model)
    if body.context_management is None:
        return {"input_tokens": await _count(server, body)}
    shorter, _ = await edited(body, partial(_count, server))
    return {
        "input_tokens": await _count(server, shorter),
        "context_management": {"original_input_tokens": await _count(server, body)},
    }


async def _count(server: ServerState, body: CountTokensBody) -> int:
    chat = chat_body(body, knows_efforts=_knows_efforts(server))
    with in_callers_words(renames_of(body)):
        prompt = await render(server, chat.messages, chat)
        (ids,) = await encode(server, [prompt], add_special_tokens=False, param="messages")
    return len(ids)


def _knows_efforts(server: ServerState) -> bool:
    return EFFORT in server.tokenizer.template_variables


def anthropic_routes(server: ServerState) -> APIRouter:
    """Return the routes of Anthropic's API that generate no text."""
    router = APIRouter(tags=["tokens"])

    @router.post("/v1/messages/count_tokens")
    async def count(request: Request) -> Response:
        raw = await read_json(request, max_bytes=server.config.api.max_body_bytes)
        body = parse(CountTokensBody, raw)
        headers = server.report_ignored(body)
        return JSONAnswer(await count_tokens(server, body), headers=headers)

    return router
