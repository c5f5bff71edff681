"""/v1/responses/compact and /input_tokens: a conversation as a summary, and its length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.field_names import in_callers_words
from remora.deployments.http.core.fields import parse
from remora.deployments.http.generation.chat import PreparedChat
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.prompts import encode, render
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.responses.archive import ItemIds, archive_of, new_response_id
from remora.deployments.http.responses.bodies import (
    ConversationBody,
    PromptBody,
    ResponsesBody,
)
from remora.deployments.http.responses.input import earlier_items, with_references
from remora.deployments.http.responses.items import COMPACTION, Item, compacted
from remora.deployments.http.responses.response import usage_of
from remora.deployments.http.responses.to_chat import RENAMES, as_written, chat_body
from remora.deployments.http.responses.truncation import prepare_within

MAX_SUMMARY_TOKENS = 1024
_REQUEST = (
    "Summarize the conversation above so that it can be continued from the summary alone. Keep "
    "names, numbers, decisions, results of tools and open questions. Write only the summary."
)


class CompactBody(ConversationBody):
    """Body of /v1/responses/compact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactJob(Job):
    """A conversation to summarize.

    kept:  items that stay as they are: the messages of the user
    """

    chat: PreparedChat
    kept: list[dict[str, Any]]
    ids: ItemIds

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return OpenAI's object: the kept messages, then the summary as an item."""
        replies = self.chat.replies()
        (reply,) = await replies.gather(outputs)
        summary = {
            "id": self.ids.new(COMPACTION),
            "type": COMPACTION,
            "encrypted_content": compacted(reply.text),
        }
        return {
            "id": self.rid,
            "object": "response.compaction",
            "created_at": self.context.created,
            "output": [*self.kept, summary],
            "usage": usage_of(replies.usage([len(self.chat.prompt_ids)])),
        }


async def prepare_compact(
    server: ServerState, body: CompactBody, context: RequestContext
) -> CompactJob:
    """Return the job of a body after all checks that need no engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel, UnknownResponse, Unavailable.
    """
    archive = archive_of(server, context)
    items = [*await earlier_items(archive, body), *await with_references(archive, body.input)]
    if not items:
        raise InvalidRequest("input or previous_response_id is required.", "input")
    context = replace(context, request_id=new_response_id())
    ids = ItemIds(context.request_id)
    asked = ResponsesBody.model_construct(
        model=body.model,
        instructions=body.instructions,
        input=[*items, parse(Item, {"role": "user", "content": _REQUEST})],
        chat_template_kwargs=body.chat_template_kwargs,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )
    chat = await prepare_within(server, asked, [], context)
    room = server.plan.max_sequence_tokens - len(chat.prompt_ids)
    sampling = replace(chat.sampling, max_tokens=min(room, MAX_SUMMARY_TOKENS))
    return CompactJob(
        context=context,
        requests=(replace(chat.request, sampling=sampling),),
        chat=chat,
        kept=[as_written(item, ids) for item in items if item.role == "user"],
        ids=ids,
    )


async def count_input(server: ServerState, body: PromptBody, context: RequestContext) -> int:
    """Return the number of prompt tokens of a body.

    Raises InvalidRequest, PromptTooLong, UnknownModel, UnknownResponse, Unavailable.
    """
    await server.model(body.model)
    archive = archive_of(server, context)
    earlier = await earlier_items(archive, body)
    body = body.model_copy(update={"input": await with_references(archive, body.input)})
    chat = chat_body(body, earlier)
    with in_callers_words(RENAMES):
        prompt = await render(server, chat.messages, chat)
        (ids,) = await encode(server, [prompt], add_special_tokens=False, param="messages")
    return len(ids)
