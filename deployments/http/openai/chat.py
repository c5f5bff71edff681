"""/v1/chat/completions: turns a body into a job, and outputs into OpenAI's chat objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from remora.deployments.http.core.sse import Chunk, ChunkWriter, Frame, TextFrame
from remora.deployments.http.generation.bodies import ChatBody
from remora.deployments.http.generation.chat import PreparedChat, prepare_chat
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.replies import Replies, Reply
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.openai.chat_choices import ChoiceWriter, reasoning_names
from remora.deployments.http.openai.stored_chats import KeepAnswer, keeper_of
from remora.deployments.http.openai.style import AnswerStyle, style_of
from remora.deployments.observing.reply_clock import ReplyClock
from remora.deployments.parsers.events import Reasoning, ReplyEvent, Text
from remora.engine.types import Output


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob(Job):
    """A validated chat request.

    keep:  stores a complete answer; None = it is not stored
    """

    chat: PreparedChat
    choices: ChoiceWriter
    style: AnswerStyle
    keep: KeepAnswer | None = None

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the complete answer."""
        replies, clock = self.chat.replies(), ReplyClock(self.context.started_ns)
        await replies.gather(outputs, clock)
        answer = self.whole(replies)
        if self.style.shows_metrics:
            answer["metrics"] = replies.metrics(clock)
        if self.keep is not None:
            await self.keep(answer)
        return answer

    def whole(self, replies: Replies) -> dict[str, Any]:
        """Return the answer with these replies."""
        chat, style = self.chat, self.style
        answer = envelope(chat, style, "chat.completion")
        answer["choices"] = [self.choices.whole(reply) for reply in replies.all]
        answer["usage"] = replies.usage([len(chat.prompt_ids)])
        if style.null_fields:
            answer |= {"prompt_logprobs": None, "prompt_token_ids": None}
        if chat.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = chat.logprobs.prompt(replies.all[0].prompt_logprobs or ())
        return answer | prompt_fields(chat)

    def writer(self) -> ChatWriter:
        """Return the writer of the streamed answer."""
        return ChatWriter(self)


class ChatWriter(ChunkWriter):
    """Writes a streamed chat: a role, deltas and a finish reason for each choice; then usage."""

    def __init__(self, job: ChatJob) -> None:
        self._job = job
        self._chat = chat = job.chat
        self._choices = job.choices
        self._style = job.style
        self._replies: Replies = chat.replies()
        self._prompt_fields = prompt_fields(chat)
        self._clock = ReplyClock(job.context.started_ns)

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the chunks of one output."""
        self._clock.note(output)
        if self._style.per_token and len(output.token_ids) > 1:
            return [c for one in self._chat.tokens_of(output) for c in self.chunks(prompt, one)]
        reply = self._replies.of(prompt, output)
        begins = not reply.has_begun
        return self._pieces(reply, output, reply.add(output), begins=begins)

    async def end(self) -> Sequence[Chunk]:
        """Return the usage chunk, if requested; store the answer, if it is to be stored."""
        if self._job.keep is not None:
            await self._job.keep(self._job.whole(self._replies))
        if not self._style.shows_usage:
            return ()
        usage = self._replies.usage([len(self._chat.prompt_ids)])
        chunk = envelope(self._chat, self._style, _CHUNK) | {"choices": [], "usage": usage}
        if self._style.shows_metrics:
            chunk["metrics"] = self._replies.metrics(self._clock)
        return (chunk,)

    def framed(self, frame: Frame) -> Callable[[int, Output], bytes]:
        """Return a function that returns `chunks` as bytes.

        A chunk that differs only in its text reuses an encoded frame: only the text is encoded.
        """
        general = super().framed(frame)
        if self._choices.shows_tokens or self._style.is_continuous:
            return general
        replies = self._replies.all
        frames = {
            kind: [self._text_frame(index, kind, frame) for index in range(len(replies))]
            for kind in (Text, Reasoning)
        }
        plain = frames[Text]

        def write(prompt: int, output: Output) -> bytes:
            index = output.index
            reply = replies[index]
            if not reply.has_begun or output.finish_reason is not None:
                return general(prompt, output)
            events = reply.add(output)
            if len(events) != 1:
                return self.joined(self._pieces(reply, output, events), frame) if events else b""
            event = events[0]
            if isinstance(event, Text):
                return plain[index].of(event.text)
            if isinstance(event, Reasoning) and self._choices.shows_reasoning:
                return frames[Reasoning][index].of(event.text)
            return self.joined(self._pieces(reply, output, events), frame)

        return write

    def _text_frame(self, index: int, kind: type[Text | Reasoning], frame: Frame) -> TextFrame:
        return TextFrame(lambda text: self._chunk(self._choices.delta(index, kind(text))), frame)

    def _pieces(
        self, reply: Reply, output: Output, events: Sequence[ReplyEvent], *, begins: bool = False
    ) -> list[Chunk]:
        chunks = []
        for choice in self._choices.pieces(reply, output, events, begins=begins):
            chunk = self._chunk(choice, self._prompt_fields)
            if begins and self._style.is_continuous and "role" in choice["delta"]:
                _take_back(chunk["usage"], len(output.token_ids))
            chunks.append(chunk)
            self._prompt_fields = {}
        return chunks

    def _chunk(
        self, choice: dict[str, Any], fields: Mapping[str, Any] = MappingProxyType({})
    ) -> Chunk:
        chunk = {**envelope(self._chat, self._style, _CHUNK), "choices": [choice], **fields}
        if self._style.is_continuous:
            chunk["usage"] = self._replies.usage([len(self._chat.prompt_ids)])
        elif self._style.shows_usage:
            chunk["usage"] = None
        return chunk


def _take_back(usage: dict[str, Any], num_tokens: int) -> None:
    """Subtract tokens that later chunks contain from a usage."""
    usage["completion_tokens"] -= num_tokens
    usage["total_tokens"] -= num_tokens


_CHUNK = "chat.completion.chunk"


def envelope(chat: PreparedChat, style: AnswerStyle, kind: str) -> dict[str, Any]:
    """Return the fields of an answer or a chunk other than its choices."""
    return {
        "id": f"chatcmpl-{chat.context.request_id}",
        "object": kind,
        "created": chat.context.created,
        "model": chat.model.name,
        **style.fields,
    }


def prompt_fields(chat: PreparedChat) -> dict[str, Any]:
    """Return the fields of an answer that repeat the prompt."""
    fields: dict[str, Any] = {}
    if chat.body.return_token_ids:
        fields["prompt_token_ids"] = chat.prompt_ids
    if chat.body.return_prompt_text:
        fields["prompt_text"] = chat.prompt
    return fields


def choice_writer(server: ServerState, chat: PreparedChat, style: AnswerStyle) -> ChoiceWriter:
    """Return the writer of a chat's choices."""
    return ChoiceWriter(
        chat.body,
        chat.logprobs,
        reasoning_names(server.config.api.reasoning_field),
        style,
        num_prompt=len(chat.prompt_ids),
        echo=chat.body.echoed,
    )


async def prepare_chat_job(server: ServerState, body: ChatBody, context: RequestContext) -> ChatJob:
    """Return the job of a body after all checks that need no engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    keep = keeper_of(server, body, context) if body.store else None
    chat = await prepare_chat(server, body, context)
    style = style_of(server, body)
    return ChatJob(
        context=context,
        requests=(chat.request,),
        streams=bool(body.stream),
        chat=chat,
        choices=choice_writer(server, chat, style),
        style=style,
        keep=keep,
    )
