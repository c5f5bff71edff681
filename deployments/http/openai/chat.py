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
from remora.deployments.parsers.events import Reasoning, ReplyEvent, Text
from remora.engine.types import Output


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob(Job):
    """A validated chat request."""

    chat: PreparedChat
    choices: ChoiceWriter

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the complete answer."""
        chat, replies = self.chat, self.chat.replies()
        answer = _envelope(chat, "chat.completion")
        answer["choices"] = [self.choices.whole(reply) for reply in await replies.gather(outputs)]
        answer["usage"] = replies.usage([len(chat.prompt_ids)])
        if chat.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = chat.logprobs.prompt(replies.all[0].prompt_logprobs or ())
        return answer | _prompt_fields(chat)

    def writer(self) -> ChatWriter:
        """Return the writer of the streamed answer."""
        return ChatWriter(self.chat, self.choices)


class ChatWriter(ChunkWriter):
    """Writes a streamed chat: a role, deltas and a finish reason for each choice; then usage."""

    def __init__(self, chat: PreparedChat, choices: ChoiceWriter) -> None:
        self._chat = chat
        self._choices = choices
        self._replies: Replies = chat.replies()
        self._prompt_fields = _prompt_fields(chat)
        options = chat.body.stream_options
        self._shows_usage = options is not None and bool(options.include_usage)
        self._is_continuous = options is not None and bool(options.continuous_usage_stats)

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the chunks of one output."""
        reply = self._replies.of(prompt, output)
        begins = not reply.has_begun
        return self._pieces(reply, output, reply.add(output), begins=begins)

    async def end(self) -> Sequence[Chunk]:
        """Return the usage chunk, if requested."""
        if not self._shows_usage:
            return ()
        usage = self._replies.usage([len(self._chat.prompt_ids)])
        return (_envelope(self._chat, _CHUNK) | {"choices": [], "usage": usage},)

    def framed(self, frame: Frame) -> Callable[[int, Output], bytes]:
        """Return a function that returns `chunks` as bytes.

        A chunk that differs only in its text reuses an encoded frame: only the text is encoded.
        """
        general = super().framed(frame)
        if self._choices.shows_tokens or (self._shows_usage and self._is_continuous):
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
            chunks.append(self._chunk(choice, self._prompt_fields))
            self._prompt_fields = {}
        return chunks

    def _chunk(
        self, choice: dict[str, Any], prompt_fields: Mapping[str, Any] = MappingProxyType({})
    ) -> Chunk:
        chunk = {**_envelope(self._chat, _CHUNK), "choices": [choice], **prompt_fields}
        if self._shows_usage:
            num_prompt = len(self._chat.prompt_ids)
            chunk["usage"] = self._replies.usage([num_prompt]) if self._is_continuous else None
        return chunk


_CHUNK = "chat.completion.chunk"


def _envelope(chat: PreparedChat, kind: str) -> dict[str, Any]:
    envelope: dict[str, Any] = {
        "id": f"chatcmpl-{chat.context.request_id}",
        "object": kind,
        "created": chat.context.created,
        "model": chat.model.name,
    }
    if chat.body.service_tier is not None:
        envelope["service_tier"] = "default"
    return envelope


def _prompt_fields(chat: PreparedChat) -> dict[str, Any]:
    """Return the fields of an answer that repeat the prompt."""
    fields: dict[str, Any] = {}
    if chat.body.return_token_ids:
        fields["prompt_token_ids"] = chat.prompt_ids
    if chat.body.return_prompt_text:
        fields["prompt_text"] = chat.prompt
    return fields


async def prepare_chat_job(server: ServerState, body: ChatBody, context: RequestContext) -> ChatJob:
    """Return the job of a body after all checks that need no engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    chat = await prepare_chat(server, body, context)
    names = reasoning_names(server.config.api.reasoning_field)
    return ChatJob(
        context=context,
        requests=(chat.request,),
        streams=bool(body.stream),
        chat=chat,
        choices=ChoiceWriter(chat.body, chat.logprobs, names),
    )
