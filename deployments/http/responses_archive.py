"""Responses that can be asked for by id: those that are being written, and those that are kept."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
from dataclasses import dataclass
from typing import Any

import orjson

from remora.configs.errors import Unavailable, UnknownModel
from remora.configs.schema import ServeConfig
from remora.deployments.http.errors import unsupported
from remora.deployments.http.response_store import MemoryStore, ResponseStore, store_of
from remora.deployments.http.wire import dumps

MAX_CHAIN = 256
_PREFIX = "resp_"
_OFF_LOOP_BYTES = 64 * 1024
_FAILURES = (OSError, sqlite3.Error)

log = logging.getLogger(__name__)


class UnknownResponse(UnknownModel):
    """No response of this id is kept; what an unknown model is, it is to the table of errors."""

    default_code = "response_not_found"


@dataclass(frozen=True, slots=True)
class Record:
    """One finished response.

    response:  as it was answered
    items:     what it was asked, without what came before it in the conversation
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]


class Archive:
    """Responses by id.

    store:    None = nothing is kept
    refusal:  why not, for callers who need what is kept
    """

    def __init__(self, store: ResponseStore | None, refusal: str = "") -> None:
        self._store = store
        self._refusal = refusal
        self._running: dict[str, dict[str, Any]] = {}

    @classmethod
    def configured(cls, config: ServeConfig) -> Archive:
        """Return the archive that the operator asked for. Raises ConfigError."""
        store = store_of(config)
        num_replicas = config.parallel.num_replicas
        if store is None:
            return cls(None, "This server keeps no responses (api.response_store is none).")
        if isinstance(store, MemoryStore) and num_replicas > 1:
            return cls(
                None,
                f"This server has {num_replicas} replicas, none of which knows what another has "
                "answered. Its operator can have them share a database (api.response_store: "
                "file:/path).",
            )
        return cls(store)

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self._store is not None

    def begin(self, response: dict[str, Any]) -> None:
        """Note that a response is being written."""
        self._running[response["id"]] = response

    def end(self, response_id: str) -> None:
        """Note that a response is not being written any more."""
        self._running.pop(response_id, None)

    def running(self, response_id: str) -> dict[str, Any] | None:
        """Return a response as it was when it began, if it is being written here."""
        return self._running.get(response_id)

    async def keep(self, record: Record) -> None:
        """Keep a finished response, if anything is kept; a failure to do so is only logged."""
        if self._store is None:
            return
        written = dumps({"response": record.response, "items": record.items})
        try:
            await self._store.put(record.response["id"], written)
        except _FAILURES:
            # The answer is there, and somebody waits for it.
            log.exception("a response could not be kept")

    async def find(self, response_id: str, param: str | None = None) -> Record:
        """Return what is kept.

        Raises UnknownResponse, InvalidRequest if nothing ever is, and Unavailable.
        """
        store = self._open(param)
        try:
            written = await store.get(response_id)
        except _FAILURES as error:
            raise Unavailable("The responses that are kept cannot be read now.") from error
        if written is None:
            raise _unknown(response_id, param)
        is_long = len(written) > _OFF_LOOP_BYTES
        value = await asyncio.to_thread(orjson.loads, written) if is_long else orjson.loads(written)
        return Record(value["response"], value["items"])

    async def chain(self, response_id: str, param: str) -> list[Record]:
        """Return a response and those it continues, the oldest first.

        Raises as `find` does, and InvalidRequest for a chain of more than MAX_CHAIN.
        """
        records: list[Record] = []
        following: str | None = response_id
        while following is not None:
            if len(records) == MAX_CHAIN:
                message = f"The conversation has more than {MAX_CHAIN} responses; send it as input."
                raise unsupported(param, message)
            records.append(await self.find(following, param))
            following = records[-1].response["previous_response_id"]
        return records[::-1]

    async def forget(self, response_id: str) -> None:
        """Delete a response. Raises as `find` does."""
        store = self._open(None)
        try:
            found = await store.delete(response_id)
        except _FAILURES as error:
            raise Unavailable("The responses that are kept cannot be changed now.") from error
        if not found:
            raise _unknown(response_id, None)

    def _open(self, param: str | None) -> ResponseStore:
        if self._store is None:
            raise unsupported(param or "response_id", self._refusal)
        return self._store


def new_response_id() -> str:
    """Return an id that nobody can guess."""
    return _PREFIX + secrets.token_hex(24)


def _unknown(response_id: str, param: str | None) -> UnknownResponse:
    message = f"No response {response_id[:80]!r} is kept; it may have expired or been deleted."
    return UnknownResponse(message, param)
