"""/v1/chat/completions/batch, of vLLM: several conversations in one body, answered together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from remora.configs.errors import RequestError
from remora.deployments.http.core.body_limits import check_sequences
from remora.deployments.http.core.field_names import retold
from remora.deployments.http.generation.bodies import ChatBatchBody, ChatBody
from remora.deployments.http.generation.chat import PreparedChat, prepare_chat
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.openai.chat import choice_writer, envelope, prompt_fields
from remora.deployments.http.openai.chat_choices import ChoiceWriter
from remora.deployments.http.openai.style import AnswerStyle, style_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatBatchJob(Job):
    """Validated conversations, each with the writer of its choices."""

    chats: tuple[tuple[PreparedChat, ChoiceWriter], ...]
    style: AnswerStyle

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the complete answer; choice i * n + j is reply j to conversation i."""
        all_replies = [chat.replies() for chat, _ in self.chats]
        async for number, output in outputs:
            all_replies[number].add(0, output)
        answer = envelope(self.chats[0][0], self.style, "chat.completion")
        choices: list[dict[str, Any]] = []
        usages = []
        for (chat, writer), replies in zip(self.chats, all_replies, strict=True):
            for reply in replies.all:
                choice = writer.whole(reply) | {"index": len(choices)} | prompt_fields(chat)
                if chat.body.prompt_logprobs is not None:
                    lines = replies.all[0].prompt_logprobs or ()
                    choice["prompt_logprobs"] = chat.logprobs.prompt(lines)
                choices.append(choice)
            usages.append(replies.usage([len(chat.prompt_ids)]))
        return answer | {"choices": choices, "usage": _sum(usages)}


def _sum(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of usage objects, which may lack optional counts."""
    total: dict[str, Any] = {}
    for usage in usages:
        for name, value in usage.items():
            if isinstance(value, dict):
                total[name] = _sum([total.get(name, {}), value])
            else:
                total[name] = total.get(name, 0) + value
    return total


async def prepare_chat_batch(
    server: ServerState, body: ChatBatchBody, context: RequestContext
) -> ChatBatchJob:
    """Return the job of a body after all checks that need no engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    num_outputs = len(body.messages) * (body.n or 1)
    check_sequences(num_outputs, "messages")
    server.calls.check_size(num_outputs, "messages")
    fields = {name: getattr(body, name) for name in body.model_fields_set - {"messages"}}
    style = style_of(server, body)
    chats = []
    for number, messages in enumerate(body.messages):
        one = ChatBody.model_construct(**fields, messages=messages)
        try:
            chat = await prepare_chat(server, one, context)
        except RequestError as error:
            raise retold(error, partial(_numbered, number)) from None
        chats.append((chat, choice_writer(server, chat, style)))
    return ChatBatchJob(
        context=context,
        requests=tuple(chat.request for chat, _ in chats),
        chats=tuple(chats),
        style=style,
    )


def _numbered(number: int, name: str) -> str:
    """Return the name of a field of conversation `number`."""
    return f"messages[{number}]" if name == "messages" else name
