"""Chats that are stored for later (`store: true`), and the routes that show and change them.

A chat is a record of the storage that /v1/responses uses, too. Its key contains its owner, so
that callers who choose the same id have chats of their own; its tag is what lists filter by.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from remora.configs.errors import InvalidRequest, Unavailable, UnknownModel
from remora.deployments.http.core.fields import Body, Metadata, parse
from remora.deployments.http.core.wire import JSONAnswer, dumps
from remora.deployments.http.generation.bodies import ChatBody
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.routes import read_body
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.storage.storage import STORE_FAILURES, Storage, storage_of
from remora.deployments.http.storage.store import ResponseStore

MAX_LISTED = 100
_PREFIX = "chat:"
_SHOWN = (  # fields of a body that a stored chat repeats
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "tools",
    "response_format",
)

log = logging.getLogger(__name__)

KeepAnswer = Callable[[dict[str, Any]], Awaitable[None]]


class UnknownChat(UnknownModel):
    """No chat with this id is stored. Has the HTTP status of an unknown model."""

    default_code = "chat_completion_not_found"


class MetadataBody(Body):
    """Body that changes a stored chat."""

    metadata: Metadata


@dataclass(frozen=True, slots=True)
class _Entry:
    """A stored chat in a list, before its record is read."""

    key: str
    id: str
    owner: str
    created: int
    model: str
    metadata: Mapping[str, str]


class StoredChats:
    """Stored chats as one caller sees them.

    owner:   owner of the chats that the caller creates
    viewer:  owner of the chats that the caller sees; None = all chats
    """

    def __init__(self, storage: Storage, owner: str, viewer: str | None) -> None:
        self._storage = storage
        self._owner = owner
        self._viewer = viewer

    def check_keeps(self) -> None:
        """Raise InvalidRequest if nothing is stored."""
        self._open()

    async def keep(self, answer: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Store a complete answer and the messages before it; log a failure and continue."""
        try:
            await self._put(self._owner, {"answer": answer, "messages": messages})
        except STORE_FAILURES:
            # The answer is complete and the client waits for it, so the failure is not raised.
            log.exception("stored chats: an answer could not be stored")

    async def find(self, chat_id: str) -> tuple[str, dict[str, Any]]:
        """Return the owner and the record of a chat. Raises UnknownChat and Unavailable."""
        owners = [self._viewer] if self._viewer is not None else await self._owners(chat_id)
        for owner in owners:
            try:
                written = await self._open().get(_key(owner, chat_id))
            except STORE_FAILURES as error:
                raise _unreadable() from error
            if written is not None:
                return owner, orjson.loads(written)
        raise UnknownChat(
            f"No chat completion {chat_id[:80]!r} is stored; it was created without store, has "
            "expired, or has been deleted."
        )

    async def change(self, chat_id: str, metadata: dict[str, str] | None) -> dict[str, Any]:
        """Replace the metadata of a chat; return its answer. Raises the errors of `find`."""
        owner, record = await self.find(chat_id)
        record["answer"]["metadata"] = metadata
        try:
            await self._put(owner, record)
        except STORE_FAILURES as error:
            raise _unreadable() from error
        answer: dict[str, Any] = record["answer"]
        return answer

    async def forget(self, chat_id: str) -> None:
        """Delete a chat. Raises the errors of `find`."""
        owner, _ = await self.find(chat_id)
        try:
            await self._open().delete(_key(owner, chat_id))
        except STORE_FAILURES as error:
            raise _unreadable() from error

    async def listed(self, *, model: str | None, metadata: Mapping[str, str]) -> list[_Entry]:
        """Return all chats that the caller sees and that fit, the oldest first."""
        entries = [
            entry
            for entry in await self._entries()
            if (model is None or entry.model == model)
            and all(entry.metadata.get(name) == value for name, value in metadata.items())
        ]
        return sorted(entries, key=lambda entry: (entry.created, entry.id))

    async def answers(self, entries: Iterable[_Entry]) -> list[dict[str, Any]]:
        """Return the answers of chats; one that has expired meanwhile is left out."""
        try:
            written = [await self._open().get(entry.key) for entry in entries]
        except STORE_FAILURES as error:
            raise _unreadable() from error
        return [orjson.loads(record)["answer"] for record in written if record is not None]

    async def _put(self, owner: str, record: dict[str, Any]) -> None:
        answer = record["answer"]
        tag = {name: answer[name] for name in ("id", "created", "model", "metadata")}
        key = _key(owner, answer["id"])
        await self._open().put(key, dumps(record), dumps(tag | {"owner": owner}))

    async def _owners(self, chat_id: str) -> list[str]:
        return [entry.owner for entry in await self._entries() if entry.id == chat_id]

    async def _entries(self) -> list[_Entry]:
        try:
            found = await self._open().tags(_PREFIX)
        except STORE_FAILURES as error:
            raise _unreadable() from error
        tags = [(key, orjson.loads(tag)) for key, tag in found]
        return [
            _Entry(key, **tag | {"metadata": tag["metadata"] or {}})
            for key, tag in tags
            if self._viewer in (None, tag["owner"])
        ]

    def _open(self) -> ResponseStore:
        return self._storage.open("store")


def _key(owner: str, chat_id: str) -> str:
    return f"{_PREFIX}{len(owner)}:{owner}:{chat_id}"


def _unreadable() -> Unavailable:
    return Unavailable("The chats that are stored cannot be read now.")


def stored_chats_of(server: ServerState, context: RequestContext) -> StoredChats:
    """Return the stored chats as a request's caller sees them."""
    return StoredChats(storage_of(server), context.owner, context.viewer)


def keeper_of(server: ServerState, body: ChatBody, context: RequestContext) -> KeepAnswer:
    """Return the function that stores the answer to a body.

    Raises InvalidRequest if nothing is stored.
    """
    chats = stored_chats_of(server, context)
    chats.check_keeps()
    given = body.model_dump(exclude_none=True, include={*_SHOWN, "metadata"})

    async def keep(answer: dict[str, Any]) -> None:
        shown = {name: given.get(name) for name in _SHOWN}
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        whole = answer | shown | {"metadata": given.get("metadata")}
        await chats.keep(whole, messages)

    return keep


def stored_chat_routes(server: ServerState) -> APIRouter:
    """Return the routes of stored chats."""
    router = APIRouter(tags=["stored chats"])

    def chats_for(request: Request) -> StoredChats:
        return stored_chats_of(server, RequestContext.of(request, server.metrics.labels))

    @router.get("/v1/chat/completions")
    async def list_chats(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "asc",
        after: str | None = None,
        model: str | None = None,
    ) -> Response:
        chats = chats_for(request)
        entries = await chats.listed(model=model, metadata=_filters(request))
        page, has_more = _page(entries if order == "asc" else entries[::-1], limit, after)
        return JSONAnswer(_list(await chats.answers(page), has_more=has_more))

    @router.get("/v1/chat/completions/{chat_id}")
    async def retrieve(request: Request, chat_id: str) -> Response:
        return JSONAnswer((await chats_for(request).find(chat_id))[1]["answer"])

    @router.post("/v1/chat/completions/{chat_id}")
    async def change(request: Request, chat_id: str) -> Response:
        chats = chats_for(request)
        await chats.find(chat_id)  # also without a body
        body = parse(MetadataBody, await read_body(server, request))
        return JSONAnswer(await chats.change(chat_id, body.metadata))

    @router.delete("/v1/chat/completions/{chat_id}")
    async def delete(request: Request, chat_id: str) -> Response:
        await chats_for(request).forget(chat_id)
        return JSONAnswer({"id": chat_id, "object": "chat.completion.deleted", "deleted": True})

    @router.get("/v1/chat/completions/{chat_id}/messages")
    async def messages(
        request: Request,
        chat_id: str,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "asc",
        after: str | None = None,
    ) -> Response:
        _, record = await chats_for(request).find(chat_id)
        shown = [
            {"id": f"{chat_id}-{number}", "content": None, **message, "content_parts": None}
            for number, message in enumerate(record["messages"])
        ]
        ids = [message["id"] for message in shown]
        start = _after(ids if order == "asc" else ids[::-1], after)
        ordered = shown if order == "asc" else shown[::-1]
        page = ordered[start : start + limit]
        return JSONAnswer(_list(page, has_more=len(ordered) > start + limit))

    return router


def _filters(request: Request) -> dict[str, str]:
    """Return the metadata that a list is restricted to: the query's `metadata[NAME]`."""
    return {
        name.removeprefix("metadata[").removesuffix("]"): value
        for name, value in request.query_params.items()
        if name.startswith("metadata[") and name.endswith("]")
    }


def _page(entries: list[_Entry], limit: int, after: str | None) -> tuple[list[_Entry], bool]:
    """Return up to `limit` entries after an id, and whether there are more."""
    start = _after([entry.id for entry in entries], after)
    return entries[start : start + limit], len(entries) > start + limit


def _after(ids: list[str], after: str | None) -> int:
    if after is None:
        return 0
    if after not in ids:
        raise InvalidRequest(
            f"after: {after[:80]!r} is not the id of an entry of the list.", "after"
        )
    return ids.index(after) + 1


def _list(page: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }
