"""Which adapters are to be served: names, versions, owners, and the file that keeps them.

Pure book-keeping over SQLite, in memory or in a file: every change is written before it is told to
anybody. Knows neither replicas nor what lies in an adapter's files.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import takewhile
from pathlib import Path

from remora.configs.errors import ConfigError, InvalidRequest, UnknownModel
from remora.configs.sections.lora import ADAPTER_NAME
from remora.lora.records import AdapterRecord, Desired, Owner

# Replicas hear of every change at once; one that has missed more is told everything.
MAX_CHANGES = 256
_NAME = re.compile(ADAPTER_NAME)
_COLUMNS = tuple(field.name for field in fields(AdapterRecord))
_SCHEMA = """
CREATE TABLE IF NOT EXISTS adapters (
    name TEXT PRIMARY KEY, version INTEGER NOT NULL UNIQUE, source TEXT NOT NULL,
    pinned INTEGER NOT NULL, owner TEXT NOT NULL, digest TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS versions (last INTEGER NOT NULL);
"""


class Registry:
    """The desired set.

    store:       file, made if it is not there; None = in memory only
    base:        name of the base model, which no adapter may bear
    max_pinned:  adapters that may be pinned at a time

    Raises ConfigError if the file cannot be used.
    """

    def __init__(self, store: str | None = None, *, base: str, max_pinned: int) -> None:
        self._base = base
        self._max_pinned = max_pinned
        self._revision = time.time_ns()  # another than all of a manager before
        # Revisions and the names whose records changed with them; the first one changed nothing.
        self._changes = deque([(self._revision, frozenset[str]())], MAX_CHANGES)
        self._staged: dict[int, AdapterRecord] = {}
        self._ended: set[int] = set()
        try:
            file = ":memory:" if store is None else Path(store).expanduser()
            if isinstance(file, Path):
                file.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(file, isolation_level=None)
            self._file.execute("PRAGMA synchronous = FULL")
            self._file.executescript(_SCHEMA)
            # A store that was lost must not draw again what replicas still know.
            self._file.execute(
                "INSERT INTO versions SELECT ? WHERE NOT EXISTS (SELECT 1 FROM versions)",
                (time.time_ns() // 1_000_000,),
            )
            self._records = self._read()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"lora.store = {store} cannot be used ({error}); name a file that this process may "
                "write, or remove a broken one"
            ) from error
        self.is_new = not self._records

    @property
    def revision(self) -> int:
        """Of what replicas are to serve; grows with every change."""
        return self._revision

    @property
    def records(self) -> tuple[AdapterRecord, ...]:
        """What is served."""
        return tuple(self._records.values())

    @property
    def ended(self) -> frozenset[int]:
        """Versions whose requests are to be ended."""
        return frozenset(self._ended)

    def desired(self, known: int = 0) -> Desired:
        """Return what replicas are to serve.

        known:  the revision that a replica has; it is told what has changed since, if that is known
        """
        changed = self._changed_since(known)
        active = self._records.keys() if changed is None else self._records.keys() & changed
        return Desired(
            revision=self._revision,
            follows=0 if changed is None else known,
            active=tuple(self._records[name] for name in active),
            gone=frozenset((changed or set()) - self._records.keys()),
            staged=tuple(self._staged.values()),
            ended=self.ended,
        )

    def find(self, name: str) -> AdapterRecord | None:
        """Return what is served under a name."""
        return self._records.get(name)

    def check_name(self, name: str) -> None:
        """Raise InvalidRequest for a name that an adapter cannot have."""
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
        """Let replicas load a new version; nothing is served yet. Raises InvalidRequest."""
        self.check_name(name)
        if pinned:
            self._check_pins(name)
        record = AdapterRecord(
            name=name, version=self._draw(), source=source, pinned=pinned, owner=owner
        )
        self._staged[record.version] = record
        self._note_change()
        return record

    def commit(self, version: int, digest: str) -> AdapterRecord:
        """Serve a staged version from now on, instead of an older one of its name."""
        record = replace(self._staged.pop(version), digest=digest)
        self._put([record])
        return record

    def drop(self, version: int) -> None:
        """Forget a staged version; also one that is not there."""
        if self._staged.pop(version, None) is not None:
            self._note_change()

    def remove(self, name: str, *, ends: bool = False) -> AdapterRecord:
        """Serve an adapter no longer. Raises UnknownModel.

        ends:  whether its open requests are ended, too
        """
        record = self._known(name)
        self._file.execute("DELETE FROM adapters WHERE name = ?", (name,))
        del self._records[name]
        if ends:
            self._ended.add(record.version)
        self._note_change(name)
        return record

    def forget_ended(self, version: int) -> None:
        """Nobody has the version any more."""
        self._ended.discard(version)

    def pin(self, name: str, *, pinned: bool) -> AdapterRecord:
        """Let an adapter stay loaded, or not. Raises UnknownModel, InvalidRequest."""
        record = self._known(name)
        if pinned and not record.pinned:
            self._check_pins(name)
        if pinned != record.pinned:
            record = replace(record, pinned=pinned)
            self._put([record])
        return record

    def note_digest(self, name: str, version: int, digest: str) -> None:
        """Remember what a version's files were when they were loaded first."""
        record = self._records.get(name)
        if record is not None and record.version == version and not record.digest:
            self._put([replace(record, digest=digest)])

    def replace_owned(self, owner: Owner, sources: Iterable[tuple[str, str]]) -> None:
        """Let an owner's adapters be these names and sources; same ones keep their versions.

        What another owner has loaded under such a name stays as it is.
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
            record = AdapterRecord(
                name=name, version=self._draw(), source=source, pinned=False, owner=owner
            )
            new.append(record)
        if new:
            self._put(new)

    def restore(self, records: Iterable[AdapterRecord]) -> None:
        """Take in what replicas serve that outlived a store."""
        lost = [record for record in records if record.name not in self._records]
        if lost:
            self._put(lost)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _note_change(self, *names: str) -> None:
        self._revision += 1
        self._changes.append((self._revision, frozenset(names)))

    def _changed_since(self, revision: int) -> set[str] | None:
        """Return the names whose records have changed; None = that is not known."""
        newer = list(takewhile(lambda change: change[0] > revision, reversed(self._changes)))
        if len(newer) == len(self._changes) or revision > self._revision:
            return None
        return set[str]().union(*(names for _, names in newer))

    def _known(self, name: str) -> AdapterRecord:
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
                f"{len(pinned)} adapters are pinned, and at least one place must be free for "
                f"others: at most {self._max_pinned} may be. Unpin one, or raise "
                "lora.max_loras_per_batch and lora.max_loaded_loras.",
                "pinned",
            )

    def _draw(self) -> int:
        self._file.execute("UPDATE versions SET last = last + 1")
        (last,) = self._file.execute("SELECT last FROM versions").fetchone()
        return int(last)

    def _read(self) -> dict[str, AdapterRecord]:
        rows = self._file.execute(f"SELECT {', '.join(_COLUMNS)} FROM adapters ORDER BY version")
        read = (dict(zip(_COLUMNS, row, strict=True)) for row in rows)
        return {row["name"]: AdapterRecord(**row | {"pinned": bool(row["pinned"])}) for row in read}

    def _put(self, records: Sequence[AdapterRecord]) -> None:
        marks = ", ".join("?" * len(_COLUMNS))
        rows = [tuple(getattr(record, name) for name in _COLUMNS) for record in records]
        with self._file:
            self._file.execute("BEGIN")
            self._file.executemany(f"INSERT OR REPLACE INTO adapters VALUES ({marks})", rows)
        self._records |= {record.name: record for record in records}
        self._note_change(*(record.name for record in records))
