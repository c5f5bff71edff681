"""JSON records in a folder, one file each, shared by several processes.

Renaming makes writes atomic. This module does not know the contents of the records. An id is a
fixed prefix and 128 random bits: it cannot be guessed, and no id made by a client ever becomes a
path.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from remora.configs.errors import ConfigError


class Records:
    """The records of one kind.

    prefix:  of their ids, such as `file-`
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder = folder
        self._prefix = prefix
        self._is_id = re.compile(f"{re.escape(prefix)}[0-9a-f]{{32}}").fullmatch
        if not folder.is_absolute():
            raise ConfigError(
                f"api.batch_dir: {folder} is relative, and replicas have a working folder of their "
                "own; write the whole path"
            )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"api.batch_dir: {folder} cannot be made ({error.strerror}); name a folder that "
                "the server may write to"
            ) from None

    def new_id(self) -> str:
        """Return a new random id."""
        return f"{self._prefix}{uuid.uuid4().hex}"

    def path(self, record_id: str, ending: str) -> Path:
        """Return the path of a file of a record, such as its `.json`.

        Raises ValueError for an invalid id.
        """
        if not self._is_id(record_id):
            raise ValueError(record_id)
        return self.folder / f"{record_id}{ending}"

    def read(self, record_id: str) -> dict[str, Any] | None:
        """Return a record; None = it does not exist, or the id is invalid."""
        try:
            record: dict[str, Any] = orjson.loads(self.path(record_id, ".json").read_bytes())
        except (ValueError, FileNotFoundError):
            return None
        return record

    def write(self, record_id: str, record: Mapping[str, Any]) -> None:
        """Write or replace a record atomically; readers see either the old or the new one."""
        draft = self.path(record_id, f".{os.getpid()}.draft")
        with draft.open("wb") as file:
            file.write(orjson.dumps(dict(record)))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path(record_id, ".json"))

    def ids(self) -> list[str]:
        """Return the ids of all records, in no particular order."""
        found = (path.stem for path in self.folder.glob(f"{self._prefix}*.json"))
        return [record_id for record_id in found if self._is_id(record_id)]

    def delete(self, record_id: str, *endings: str) -> None:
        """Delete a record, and its files with these other endings."""
        for ending in (".json", *endings):
            self.path(record_id, ending).unlink(missing_ok=True)
