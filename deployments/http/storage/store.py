"""Stores of finished answers, which later requests continue, show or list.

A store knows ids, bytes, ages and the total size, and a short tag of each record that is to be
found without its id. It does not know the content or the access rights; its callers do. Age counts
from the last use, so that a conversation in progress keeps its first responses.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig

MAX_MEMORY_BYTES = 256 * 2**20
MAX_FILE_BYTES = 2**30
_BUSY_TIMEOUT_S = 10.0
_OPTION = "api.response_store"

ResultT = TypeVar("ResultT")


class ResponseStore(Protocol):
    """A store of bytes by id. A record may be evicted at any time."""

    async def get(self, response_id: str) -> bytes | None:
        """Return a record, or None; reset the record's age."""
        ...

    async def put(self, response_id: str, record: bytes, tag: bytes = b"") -> None:
        """Store a record; evict older records if necessary."""
        ...

    async def tags(self, prefix: str) -> list[tuple[str, bytes]]:
        """Return ids with this beginning, and the records' tags; their ages stay."""
        ...

    async def delete(self, response_id: str) -> bool:
        """Delete a record; return whether it existed."""
        ...


class MemoryStore:
    """Records in this process."""

    def __init__(
        self,
        ttl_s: float,
        *,
        max_bytes: int = MAX_MEMORY_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        # Id -> last use, record, tag; the least used first.
        self._records: OrderedDict[str, tuple[float, bytes, bytes]] = OrderedDict()
        self._num_bytes = 0

    async def get(self, response_id: str) -> bytes | None:
        """Return a record, or None; reset the record's age."""
        self._drop_expired()
        entry = self._records.get(response_id)
        if entry is None:
            return None
        self._records[response_id] = (self._clock(), *entry[1:])
        self._records.move_to_end(response_id)
        return entry[1]

    async def put(self, response_id: str, record: bytes, tag: bytes = b"") -> None:
        """Store a record; evict older records if necessary."""
        self._drop(response_id)
        self._drop_expired()
        self._records[response_id] = (self._clock(), record, tag)
        self._num_bytes += len(record) + len(tag)
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._records)))

    async def delete(self, response_id: str) -> bool:
        """Delete a record; return whether it existed."""
        self._drop_expired()
        return self._drop(response_id)

    async def tags(self, prefix: str) -> list[tuple[str, bytes]]:
        """Return ids with this beginning, and the records' tags; their ages stay."""
        self._drop_expired()
        records = self._records.items()
        return [(id_, tag) for id_, (_, _, tag) in records if id_.startswith(prefix)]

    def _drop(self, response_id: str) -> bool:
        entry = self._records.pop(response_id, None)
        self._num_bytes -= len(entry[1]) + len(entry[2]) if entry else 0
        return entry is not None

    def _drop_expired(self) -> None:
        oldest = self._clock() - self._ttl_s
        while self._records:
            response_id, (used_at, _, _) = next(iter(self._records.items()))
            if used_at > oldest:
                return
            self._drop(response_id)


_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, used_at REAL NOT NULL, num_bytes INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON responses (used_at, num_bytes);
CREATE TABLE IF NOT EXISTS tags (id TEXT PRIMARY KEY, tag BLOB NOT NULL);
"""


class FileStore:
    """Records in an SQLite database, which the replicas of one machine may share.

    Each call opens the database in a thread, so no process holds a connection or a lock between
    calls. Only the file's owner can read and write it.
    """

    def __init__(
        self,
        path: Path,
        ttl_s: float,
        *,
        max_bytes: int = MAX_FILE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the database if it does not exist. Raises ConfigError."""
        self._path = path
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            with self._open() as database:
                database.execute("PRAGMA journal_mode = WAL")
                database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{_OPTION}: {str(path)!r} cannot be opened as a database ({error}). Name a file "
                "in a folder that this process may write to."
            ) from error

    async def get(self, response_id: str) -> bytes | None:
        """Return a record, or None; reset the record's age."""

        def work(database: sqlite3.Connection, now: float) -> bytes | None:
            rows = database.execute(
                "UPDATE responses SET used_at = ? WHERE id = ? AND used_at > ? RETURNING record",
                (now, response_id, now - self._ttl_s),
            ).fetchall()
            return bytes(rows[0][0]) if rows else None

        return await self._in_thread(work)

    async def put(self, response_id: str, record: bytes, tag: bytes = b"") -> None:
        """Store a record; evict older records if necessary."""

        def work(database: sqlite3.Connection, now: float) -> None:
            database.execute("DELETE FROM responses WHERE used_at <= ?", (now - self._ttl_s,))
            database.execute(
                "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?)",
                (response_id, now, len(record) + len(tag), record),
            )
            database.execute("DELETE FROM tags WHERE id NOT IN (SELECT id FROM responses)")
            if tag:
                database.execute("INSERT OR REPLACE INTO tags VALUES (?, ?)", (response_id, tag))
            self._make_room(database)

        await self._in_thread(work)

    async def tags(self, prefix: str) -> list[tuple[str, bytes]]:
        """Return ids with this beginning, and the records' tags; their ages stay."""

        def work(database: sqlite3.Connection, now: float) -> list[tuple[str, bytes]]:
            rows = database.execute(
                "SELECT id, tag FROM tags JOIN responses USING (id) "
                "WHERE used_at > ? AND substr(id, 1, ?) = ?",
                (now - self._ttl_s, len(prefix), prefix),
            )
            return [(id_, bytes(tag)) for id_, tag in rows]

        return await self._in_thread(work)

    async def delete(self, response_id: str) -> bool:
        """Delete a record; return whether it existed."""

        def work(database: sqlite3.Connection, now: float) -> bool:
            rows = database.execute(
                "DELETE FROM responses WHERE id = ? RETURNING used_at", (response_id,)
            ).fetchall()
            return bool(rows) and bool(rows[0][0] > now - self._ttl_s)

        return await self._in_thread(work)

    def _make_room(self, database: sqlite3.Connection) -> None:
        (num_bytes,) = database.execute("SELECT total(num_bytes) FROM responses").fetchone()
        excess = num_bytes - self._max_bytes
        if excess <= 0:
            return
        # `before` is the size of all less recently used records: delete while it is below the
        # excess.
        database.execute(
            "DELETE FROM responses WHERE id IN (SELECT id FROM (SELECT id, sum(num_bytes) OVER "
            "(ORDER BY used_at, id) - num_bytes AS before FROM responses) WHERE before < ?)",
            (excess,),
        )

    async def _in_thread(self, work: Callable[[sqlite3.Connection, float], ResultT]) -> ResultT:
        def run() -> ResultT:
            with self._open() as database:
                return work(database, self._clock())

        return await asyncio.to_thread(run)

    @contextmanager
    def _open(self) -> Generator[sqlite3.Connection, None, None]:
        """Open the database for one transaction; an exception rolls it back."""
        database = sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S)
        try:
            with database:
                yield database
        finally:
            database.close()


def store_of(config: ServeConfig) -> ResponseStore | None:
    """Return the configured store; None if responses are not stored. Raises ConfigError."""
    name, ttl_s = config.api.response_store, config.api.response_ttl_s
    if name == "none":
        return None
    if name == "memory":
        return MemoryStore(ttl_s)
    kind, _, path = name.partition(":")
    if kind == "file" and path.startswith("/"):
        return FileStore(Path(path), ttl_s)
    raise ConfigError(f"{_OPTION} is {name!r}; use memory, none, or file:/path of a database.")
