"""Where finished responses are kept, so that a later one can continue them.

A store knows ids and bytes, their age and their sum; what the bytes say is the business of
`responses_archive.py`, and so is who may see it. Age counts from the last use, so that a
conversation does not lose its beginning while it goes on.
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
    """Keeps bytes by id for a while. Whatever is put may be gone at the next moment."""

    async def get(self, response_id: str) -> bytes | None:
        """Return what is kept, None if nothing is; its age begins anew."""
        ...

    async def put(self, response_id: str, record: bytes) -> None:
        """Keep a record; older ones give way if need be."""
        ...

    async def delete(self, response_id: str) -> bool:
        """Forget a record; whether there was one."""
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
        self._records: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # least used first
        self._num_bytes = 0

    async def get(self, response_id: str) -> bytes | None:
        """Return what is kept, None if nothing is; its age begins anew."""
        self._drop_expired()
        entry = self._records.get(response_id)
        if entry is None:
            return None
        self._records[response_id] = (self._clock(), entry[1])
        self._records.move_to_end(response_id)
        return entry[1]

    async def put(self, response_id: str, record: bytes) -> None:
        """Keep a record; older ones give way if need be."""
        self._drop(response_id)
        self._drop_expired()
        self._records[response_id] = (self._clock(), record)
        self._num_bytes += len(record)
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._records)))

    async def delete(self, response_id: str) -> bool:
        """Forget a record; whether there was one."""
        self._drop_expired()
        return self._drop(response_id)

    def _drop(self, response_id: str) -> bool:
        entry = self._records.pop(response_id, None)
        self._num_bytes -= len(entry[1]) if entry else 0
        return entry is not None

    def _drop_expired(self) -> None:
        oldest = self._clock() - self._ttl_s
        while self._records:
            response_id, (used_at, _) = next(iter(self._records.items()))
            if used_at > oldest:
                return
            self._drop(response_id)


_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, used_at REAL NOT NULL, num_bytes INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON responses (used_at, num_bytes);
"""


class FileStore:
    """Records in an SQLite database, which the replicas of one machine may share.

    Each call opens the database for itself, in a thread: nothing is held between calls, by
    whichever process. The file is its owner's alone.
    """

    def __init__(
        self,
        path: Path,
        ttl_s: float,
        *,
        max_bytes: int = MAX_FILE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make the database unless it is there. Raises ConfigError."""
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
        """Return what is kept, None if nothing is; its age begins anew."""

        def work(database: sqlite3.Connection, now: float) -> bytes | None:
            rows = database.execute(
                "UPDATE responses SET used_at = ? WHERE id = ? AND used_at > ? RETURNING record",
                (now, response_id, now - self._ttl_s),
            ).fetchall()
            return bytes(rows[0][0]) if rows else None

        return await self._in_thread(work)

    async def put(self, response_id: str, record: bytes) -> None:
        """Keep a record; older ones give way if need be."""

        def work(database: sqlite3.Connection, now: float) -> None:
            database.execute("DELETE FROM responses WHERE used_at <= ?", (now - self._ttl_s,))
            database.execute(
                "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?)",
                (response_id, now, len(record), record),
            )
            self._make_room(database)

        await self._in_thread(work)

    async def delete(self, response_id: str) -> bool:
        """Forget a record; whether there was one."""

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
        # Each row with the bytes of all rows used before it: those are to go until it is enough.
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
        """Open the database for one transaction, which an exception undoes."""
        database = sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S)
        try:
            with database:
                yield database
        finally:
            database.close()


def store_of(config: ServeConfig) -> ResponseStore | None:
    """Return the configured store; None where nothing is to be kept. Raises ConfigError."""
    name, ttl_s = config.api.response_store, config.api.response_ttl_s
    if name == "none":
        return None
    if name == "memory":
        return MemoryStore(ttl_s)
    kind, _, path = name.partition(":")
    if kind == "file" and path.startswith("/"):
        return FileStore(Path(path), ttl_s)
    raise ConfigError(f"{_OPTION} is {name!r}; use memory, none, or file:/path of a database.")
