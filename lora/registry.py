"""The adapters to serve, by name, and the SQLite database that stores them.

The database is a file or in memory; every change is written before replicas see it. Knows neither
replicas nor the content of an adapter's files.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from remora.configs.errors import ConfigError, InvalidRequest, UnknownModel
from remora.configs.sections.lora import ADAPTER_NAME
from remora.lora.records import AdapterRecord, Desired, Owner

# Changes that are kept for replicas; one that missed more gets the complete state.
MAX_CHANGES = 256
_NAME = re.compile(ADAPTER_NAME)
# The columns are the fields of AdapterRecord, in their order; `version` is the lora_id.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS adapters (
    name TEXT PRIMARY KEY, version INTEGER NOT NULL UNIQUE, source TEXT NOT NULL,
    pinned INTEGER NOT NULL, owner TEXT NOT NULL, digest TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS versions (last INTEGER NOT NULL);
"""


class Registry:
    """The adapters to serve.

    store:       database file, created if missing; None = in memory
    base:        name of the base model, which no adapter may have
    max_pinned:  largest number of pinned adapters

    Raises ConfigError if the file cannot be used.
    """

    def __init__(self, store: str | None = None, *, base: str, max_pinned: int) -> None:
        self._base = base
        self._max_pinned = max_pinned
        # Grows with every change; differs from every revision of an earlier manager.
        self.revision = time.time_ns()
        # Revisions with the names whose records they changed; the first one changed none.
        self._changes = deque([(self.revision, tuple[str, ...]())], MAX_CHANGES)
        self._staged: dict[int, AdapterRecord] = {}
        self._ended: set[int] = set()
        try:
            file = ":memory:" if store is None else Path(store).expanduser()
            if isinstance(file, Path):
                file.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
            self._file = sqlite3.connect(file, isolation_level=None)
            self._file.execute("PRAGMA synchronous = FULL")
            self._file.executescript(_SCHEMA)
            # After the store was lost, new ids must differ from the ones on replicas.
            self._file.execute(
                "INSERT INTO versions SELECT ? WHERE NOT EXISTS (SELECT 1 FROM versions)",
                (time.time_ns() // 1_000_000,),
            )
            self._records = self._read()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"lora.store = {store} cannot be used ({error}); set it to a writable file, or "
                "remove the file if it is broken"
            ) from error
        self.is_new = not self._records

    @property
    def records(self) -> tuple[AdapterRecord, ...]:
        """The served adapters."""
        return tuple(self._records.values())

    @property
    def ended(self) -> frozenset[int]:
        """The lora_ids whose requests are aborted."""
        return frozenset(self._ended)

    def desired(self, known: int = 0) -> Desired:
        """Return the changes for a replica that has the revision `known`.

        That is the complete state if `known` is too old or a revision of another manager.
        """
        changed = self._changed_since(known)
        names = self._records if changed is None else changed
        return Desired(
            revision=self.revision,
            follows=0 if changed is None else known,
            active=tuple(self._records[name] for name in names if name in self._records),
            gone=frozenset(name for name in names if name not in self._records),
            staged=tuple(self._staged.values()),
            ended=self.ended,
        )

    def find(self, name: str) -> AdapterRecord | None:
        """Return the adapter that is served under a name."""
        return self._records.get(name)

    def check_name(self, name: str) -> None:
        """Raise InvalidRequest if an adapter cannot have this name."""
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name[:200]!r} cannot be the name of an adapter: use at most 128 letters, "
                "digits, '.', '_' and '-', beginning with a letter or digit.",
                "lora_name",
            )
        if name == self._base:
            raise InvalidRequest(
                f"{name!r} is the name of the base model; give the adapter another.", "lora_name"
            )

    def stage(self, name: str, source: str, *, owner: Owner, pinned: bool = False) -> AdapterRecord:
        """Let replicas load an adapter that is not served yet. Raises InvalidRequest."""
        self.check_name(name)
        if pinned:
            self._check_pins(name)
        record = AdapterRecord(name, self._next_id(), source, pinned, owner)
        self._staged[record.lora_id] = record
        self._note_change()
        return record

    def commit(self, lora_id: int, digest: str) -> AdapterRecord:
        """Serve a staged adapter from now on, instead of the current one of its name."""
        record = self._staged.pop(lora_id)._replace(digest=digest)
        self._put([record])
        return record

    def drop(self, lora_id: int) -> None:
        """Remove a staged adapter; no error if it is unknown."""
        if self._staged.pop(lora_id, None) is not None:
            self._note_change()

    def remove(self, name: str, *, ends: bool = False) -> AdapterRecord:
        """Stop serving an adapter. Raises UnknownModel.

        ends:  whether its open requests are aborted
        """
        record = self._get(name)
        self._file.execute("DELETE FROM adapters WHERE name = ?", (name,))
        del self._records[name]
        if ends:
            self._ended.add(record.lora_id)
        self._note_change(name)
        return record

    def forget_ended(self, lora_id: int) -> None:
        """Remove a lora_id from `ended`, once no replica has it."""
        self._ended.discard(lora_id)

    def pin(self, name: str, *, pinned: bool) -> AdapterRecord:
        """Pin or unpin an adapter. Raises UnknownModel, InvalidRequest."""
        record = self._get(name)
        if pinned and not record.pinned:
            self._check_pins(name)
        if pinned != record.pinned:
            record = record._replace(pinned=pinned)
            self._put([record])
        return record

    def note_digest(self, name: str, lora_id: int, digest: str) -> None:
        """Store the digest of an adapter's files at the first load."""
        record = self._records.get(name)
        if record is not None and record.lora_id == lora_id and not record.digest:
            self._put([record._replace(digest=digest)])

    def replace_owned(self, owner: Owner, sources: Iterable[tuple[str, str]]) -> None:
        """Set an owner's adapters to these names and sources; unchanged ones keep their lora_ids.

        Names that another owner has loaded stay unchanged.
        """
        wanted = dict(sources)
        gone = [r.name for r in self._records.values() if r.owner == owner and r.name not in wanted]
        for name in gone:
            self.remove(name)
        new = []
        for name, source in wanted.items():
            known = self._records.get(name)
            if known is not None and (known.owner != owner or known.source == source):
                continue
            new.append(AdapterRecord(name, self._next_id(), source, pinned=False, owner=owner))
        if new:
            self._put(new)

    def restore(self, records: Iterable[AdapterRecord]) -> None:
        """Add adapters that replicas still serve after the store was lost."""
        lost = [record for record in records if record.name not in self._records]
        if lost:
            self._put(lost)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _note_change(self, *names: str) -> None:
        self.revision += 1
        self._changes.append((self.revision, names))

    def _changed_since(self, revision: int) -> Iterable[str] | None:
        """Return the names whose records changed since a revision; None = unknown."""
        newer = [names for number, names in self._changes if number > revision]
        if len(newer) == len(self._changes) or revision > self.revision:
            return None
        return dict.fromkeys(chain.from_iterable(newer))

    def _get(self, name: str) -> AdapterRecord:
        record = self._records.get(name)
        if record is None:
            listed = ", ".join(map(repr, self._records)) or "none"
            raise UnknownModel(
                f"No adapter is called {name[:200]!r}; there are: {listed}.", "lora_name"
            )
        return record

    def _check_pins(self, name: str) -> None:
        pinned = {r.name for r in (*self._records.values(), *self._staged.values()) if r.pinned}
        if len(pinned - {name}) >= self._max_pinned:
            raise InvalidRequest(
                f"{len(pinned)} adapters are pinned, and one slot must stay free for others: at "
                f"most {self._max_pinned} can be pinned. Unpin one, or raise "
                "lora.max_loras_per_batch and lora.max_loaded_loras.",
                "pinned",
            )

    def _next_id(self) -> int:
        self._file.execute("UPDATE versions SET last = last + 1")
        (last,) = self._file.execute("SELECT last FROM versions").fetchone()
        return int(last)

    def _read(self) -> dict[str, AdapterRecord]:
        rows = self._file.execute("SELECT * FROM adapters ORDER BY version")
        records = map(AdapterRecord._make, rows)
        return {each.name: each._replace(pinned=bool(each.pinned)) for each in records}

    def _put(self, records: Sequence[AdapterRecord]) -> None:
        marks = ", ".join("?" * len(AdapterRecord._fields))
        with self._file:
            self._file.execute("BEGIN")
            self._file.executemany(f"INSERT OR REPLACE INTO adapters VALUES ({marks})", records)
        self._records |= {record.name: record for record in records}
        self._note_change(*(record.name for record in records))
