"""JSON records in a folder, one file each, for several processes: written whole, by renaming.

Knows nothing of what is in them. An id is a prefix of ours and 128 random bits, so none of a
client's making ever becomes a path, and none can be guessed.
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
        """Draw an id."""
        return f"{self._prefix}{uuid.uuid4().hex}"

    def path(self, record_id: str, ending: str) -> Path:
        """Return where something that belongs to a record is, such as its `.json`.

        Raises ValueError for what is no id.
        """
        if not self._is_id(record_id):
            raise ValueError(record_id)
        return self.folder / f"{record_id}{ending}"

    def read(self, record_id: str) -> dict[str, Any] | None:
        """Return a record; None = there is none, or this is no id."""
        try:
            record: dict[str, Any] = orjson.loads(self.path(record_id, ".json").read_bytes())
        except (ValueError, FileNotFoundError):
            return None
        return record

    def write(self, record_id: str, record: Mapping[str, Any]) -> None:
        """Put a record in the place of whatever was there; readers see the one or the other."""
        draft = self.path(record_id, f".{os.getpid()}.draft")
        with draft.open("wb") as file:
            file.write(orjson.dumps(dict(record)))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path(record_id, ".json"))

    def ids(self) -> list[str]:
        """Return the ids of all records, in no order."""
        found = (path.stem for path in self.folder.glob(f"{self._prefix}*.json"))
        return [record_id for record_id in found if self._is_id(record_id)]

    def delete(self, record_id: str, *endings: str) -> None:
        """Remove a record, and what belongs to it under other endings."""
        for ending in (".json", *endings):
            self.path(record_id, ending).unlink(missing_ok=True)
