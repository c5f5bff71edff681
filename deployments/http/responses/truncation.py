"""`truncation: auto`: the oldest items of a conversation that is too long are left out."""

from __future__ import annotations

from collections.abc import Sequence

from remora.configs.errors import PromptTooLong
from remora.deployments.http.core.field_names import in_callers_words
from remora.deployments.http.generation.bodies import ChatBody
from remora.deployments.http.generation.chat import PreparedChat, prepare_chat
from remora.deployments.http.generation.messages import Message
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.responses.bodies import ResponsesBody
from remora.deployments.http.responses.items import Item
from remora.deployments.http.responses.to_chat import RENAMES, chat_body


async def prepare_within(
    server: ServerState, body: ResponsesBody, earlier: Sequence[Item], context: RequestContext
) -> PreparedChat:
    """Return the prepared chat of a body, truncated if the body allows it and it is too long.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    chat = chat_body(body, earlier)
    with in_callers_words(RENAMES):
        try:
            return await prepare_chat(server, chat, context)
        except PromptTooLong:
            if body.truncation != "auto":
                raise
        return await _longest_that_fits(server, chat, context)


async def _longest_that_fits(
    server: ServerState, chat: ChatBody, context: RequestContext
) -> PreparedChat:
    """Return the chat with as few messages left out as possible. Raises PromptTooLong."""
    starts = _starts(chat.messages)
    best = await prepare_chat(server, _from(chat, starts[-1]), context)
    low, high = 0, len(starts) - 1  # all from `high` on fit, none before `low` does
    while low < high:
        middle = (low + high) // 2
        try:
            best, high = await prepare_chat(server, _from(chat, starts[middle]), context), middle
        except PromptTooLong:
            low = middle + 1
    return best


def _starts(messages: Sequence[Message]) -> list[int]:
    """Return where the rest of a conversation may begin: with a user's turn, or at the end."""
    found = [place for place, message in enumerate(messages) if message.role == "user"]
    return found or [len(messages) - 1]


def _from(chat: ChatBody, start: int) -> ChatBody:
    """Return the chat from a message on, with the system messages before it."""
    kept = [m for m in chat.messages[:start] if m.role in ("system", "developer")]
    return chat.model_copy(update={"messages": [*kept, *chat.messages[start:]]})
