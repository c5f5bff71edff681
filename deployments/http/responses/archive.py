"""Responses by id: those in progress and those stored."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from remora.configs.errors import InvalidRequest, Unavailable, UnknownModel
from remora.configs.schema import ServeConfig
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.wire import dumps
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.storage.storage import STORE_FAILURES, Storage, storage_of
from remora.deployments.http.storage.store import ResponseStore

MAX_CHAIN = 256
_PREFIX = "resp_"
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{48}")
# An item's id contains the id of its response, so items need no index of their own.
_ITEM_ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{48})[0-9a-f]{4,8}")
_ITEM_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "compaction": "cmp_",
}
# Statuses of a response that is still being made.
UNFINISHED = frozenset({"queued", "in_progress"})
STALE_S = 30.0  # without a sign of life, after which an unfinished response has failed
_EVENTS, _CANCEL = ":events", ":cancel"  # endings of a response's other records
_OFF_LOOP_BYTES = 64 * 1024

log = logging.getLogger(__name__)


class UnknownResponse(UnknownModel):
    """No response with this id is stored. Has the HTTP status of an unknown model."""

    default_code = "response_not_found"


@dataclass(frozen=True, slots=True)
class Record:
    """One response: a finished one, or one that is made in the background.

    response:  the response object, as returned
    items:     its input items, without earlier items of the conversation
    alive_at:  Unix time at which an unfinished response was last worked on
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    alive_at: float = 0.0


class Archive:
    """Responses by id, as one caller sees them. A new archive sees all responses and owns none.

    store:    None = nothing is stored
    refusal:  reason why nothing is stored, for error messages
    """

    def __init__(self, store: ResponseStore | None, refusal: str = "") -> None:
        self._store = store
        self._refusal = refusal
        self._running: dict[str, tuple[str, dict[str, Any]]] = {}
        self._owner = ""
        self._viewer: str | None = None

    @classmethod
    def configured(cls, config: ServeConfig) -> Archive:
        """Return the archive that the configuration selects. Raises ConfigError."""
        return cls.over(Storage.configured(config))

    @classmethod
    def over(cls, storage: Storage) -> Archive:
        """Return the archive of responses in a storage."""
        return cls(storage.store, storage.refusal)

    def seen_by(self, owner: str, viewer: str | None) -> Archive:
        """Return the same archive for another caller.

        owner:   owner of the responses that the caller creates
        viewer:  owner of the responses that the caller sees; None = all responses
        """
        view = copy.copy(self)
        view._owner, view._viewer = owner, viewer
        return view

    @property
    def keeps(self) -> bool:
        """Whether responses are stored."""
        return self._store is not None

    @property
    def owner(self) -> str:
        """The owner of the responses that the caller creates."""
        return self._owner

    def check_keeps(self, param: str) -> None:
        """Raise InvalidRequest, which names `param`, if nothing is stored."""
        self._open(param)

    def begin(self, response: dict[str, Any]) -> None:
        """Record that a response is in progress."""
        self._running[response["id"]] = (self._owner, response)

    def end(self, response_id: str) -> None:
        """Record that a response is no longer in progress."""
        self._running.pop(response_id, None)

    def running(self, response_id: str) -> dict[str, Any] | None:
        """Return the initial object of a response in progress on this replica; else None."""
        owner, response = self._running.get(response_id, ("", None))
        return response if self.sees(owner) else None

    def sees(self, owner: str) -> bool:
        """Return whether the caller sees the responses of an owner."""
        return self._viewer is None or self._viewer == owner

    async def keep(self, record: Record) -> None:
        """Store a response if a store is configured; log a failure and continue."""
        value = {"owner": self._owner, "response": record.response, "items": record.items}
        await self._put(record.response["id"], value | {"alive_at": record.alive_at})

    async def keep_events(self, response_id: str, events: list[dict[str, Any]]) -> None:
        """Store the events of a finished response, for streams that are resumed."""
        await self._put(response_id + _EVENTS, events)

    async def _put(self, key: str, value: Any) -> None:
        if self._store is None:
            return
        try:
            await self._store.put(key, dumps(value))
        except STORE_FAILURES:
            # The answer is complete and the client waits for it, so the failure is not raised.
            log.exception("responses: could not be stored")

    async def find(self, response_id: str, param: str | None = None) -> Record:
        """Return a stored response.

        Raises UnknownResponse, InvalidRequest if no store is configured, and Unavailable.
        """
        store = self._open(param)
        if not _RESPONSE_ID.fullmatch(response_id):  # also keys of other records
            raise _unknown(response_id, param)
        try:
            written = await store.get(response_id)
        except STORE_FAILURES as error:
            raise Unavailable("The responses that are kept cannot be read now.") from error
        if written is None:
            raise _unknown(response_id, param)
        is_long = len(written) > _OFF_LOOP_BYTES
        value = await asyncio.to_thread(orjson.loads, written) if is_long else orjson.loads(written)
        if not self.sees(value.get("owner", "")):
            raise _unknown(response_id, param)
        alive_at = value.get("alive_at", 0.0)
        return Record(_with_end(value["response"], alive_at), value["items"], alive_at)

    async def events(self, response_id: str) -> list[dict[str, Any]] | None:
        """Return the stored events of a response that the caller has found; None = none."""
        written = await self._other(response_id + _EVENTS)
        found: list[dict[str, Any]] | None = None if written is None else orjson.loads(written)
        return found

    async def ask_to_cancel(self, response_id: str) -> None:
        """Ask the replica that makes a response to cancel it. Raises Unavailable."""
        try:
            await self._open(None).put(response_id + _CANCEL, dumps(True))
        except STORE_FAILURES as error:
            raise Unavailable("The responses that are kept cannot be changed now.") from error

    async def is_to_be_cancelled(self, response_id: str) -> bool:
        """Return whether another replica has asked to cancel a response."""
        return await self._other(response_id + _CANCEL) is not None

    async def _other(self, key: str) -> bytes | None:
        try:
            return await self._open(None).get(key)
        except STORE_FAILURES as error:
            raise Unavailable("The responses that are kept cannot be read now.") from error

    async def find_item(self, item_id: str, param: str, read: dict[str, Record]) -> dict[str, Any]:
        """Return an input or output item of a stored response.

        read:  stored responses already read, by id; the item's response is added

        Raises the errors of `find`.
        """
        self._open(param)
        match = _ITEM_ID.fullmatch(item_id)
        response_id = _PREFIX + match[1] if match else ""
        if match and response_id not in read:
            with suppress(UnknownResponse):
                read[response_id] = _said(await self.find(response_id, param))
        record = read.get(response_id)
        items: list[dict[str, Any]] = []
        if record is not None:
            items = [*record.items, *record.response["output"]]
        found = next((item for item in items if item["id"] == item_id), None)
        if found is None:
            message = (
                f"No item {item_id[:80]!r} is kept; its response was not stored, has expired, or "
                "has been deleted. Send the item itself."
            )
            raise UnknownResponse(message, param, "item_not_found")
        return found

    async def chain(self, response_id: str, param: str) -> list[Record]:
        """Return a response and all responses that it continues, the oldest first.

        Raises the errors of `find`, and InvalidRequest for a chain of more than MAX_CHAIN
        responses.
        """
        records: list[Record] = []
        following: str | None = response_id
        while following is not None:
            if len(records) == MAX_CHAIN:
                message = f"The conversation has more than {MAX_CHAIN} responses; send it as input."
                raise unsupported(param, message)
            record = await self.find(following, param)
            if record.response.get("status") in UNFINISHED:
                message = f"The response {following[:80]!r} is still being made; wait for its end."
                raise InvalidRequest(message, param)
            records.append(_said(record))
            following = records[-1].response["previous_response_id"]
        return records[::-1]

    async def forget(self, response_id: str) -> None:
        """Delete a response. Raises the errors of `find`."""
        store = self._open(None)
        await self.find(response_id)
        try:
            found = await store.delete(response_id)
            for ending in (_EVENTS, _CANCEL):
                await store.delete(response_id + ending)
        except STORE_FAILURES as error:
            raise Unavailable("The responses that are kept cannot be changed now.") from error
        if not found:
            raise _unknown(response_id, None)

    def _open(self, param: str | None) -> ResponseStore:
        if self._store is None:
            raise unsupported(param or "response_id", self._refusal)
        return self._store


def archive_of(server: ServerState, context: RequestContext) -> Archive:
    """Return the server's archive as the request's caller sees it. Raises ConfigError."""
    archive = server.part(Archive, lambda _: Archive.over(storage_of(server)))
    return archive.seen_by(context.owner, context.viewer)


class ItemIds:
    """Generates ids for the items of one response."""

    def __init__(self, response_id: str) -> None:
        self._stem = response_id.removeprefix(_PREFIX)
        self._numbers = itertools.count()

    def new(self, kind: str) -> str:
        """Return the next id."""
        return f"{_ITEM_PREFIXES[kind]}{self._stem}{next(self._numbers):04x}"


def new_response_id() -> str:
    """Return an id that cannot be guessed."""
    return _PREFIX + secrets.token_hex(24)


def _said(record: Record) -> Record:
    """Return the fields that a continuation needs; others, such as tools, may be megabytes."""
    names = ("id", "previous_response_id", "output")
    return Record({name: record.response[name] for name in names}, record.items)


def _with_end(response: dict[str, Any], alive_at: float) -> dict[str, Any]:
    """Return the response; an unfinished one whose replica has stopped has failed."""
    if response.get("status") not in UNFINISHED or time.time() - alive_at < STALE_S:
        return response
    message = "The replica that made this response has stopped. Please try again."
    return response | {
        "status": "failed",
        "error": {"code": "server_error", "message": message},
    }


def _unknown(response_id: str, param: str | None) -> UnknownResponse:
    message = f"No response {response_id[:80]!r} is kept; it may have expired or been deleted."
    return UnknownResponse(message, param)
