"""Uploaded files and batch results: data under generated names, and a record of each file.

Knows nothing of HTTP. A file whose data is still being written has no record and does not exist.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from starlette.exceptions import HTTPException

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.json_records import Records

MAX_FILES, MAX_STORE_BYTES = 10_000, 10 * 2**30
KEPT_S = 30 * 86_400
_MAX_NAME_CHARS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file.

    filename:  the client's name of the file; never part of a path
    owner:     the owner (`auth.Access.owner`)
    """

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    owner: str

    def show(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        shown = asdict(self) | {"object": "file", "status": "processed"}
        del shown["owner"]
        return shown


class FileStore:
    """Files in a folder. A viewer sees the files that it owns; None sees all. Methods block."""

    def __init__(self, folder: Path) -> None:
        self._records = Records(folder, "file-")
        self.new_id = self._records.new_id

    def data_path(self, file_id: str) -> Path:
        """Return the path of a file's data, which need not exist yet."""
        return self._records.path(file_id, ".data")

    def add(self, source: BinaryIO, *, filename: str, purpose: str, owner: str) -> StoredFile:
        """Copy a file into the store. Raises InvalidRequest when the store is full."""
        self._check_room()
        file_id = self.new_id()
        path = self.data_path(file_id)
        try:
            with path.open("xb") as target:
                shutil.copyfileobj(source, target)
            return self.publish(file_id, filename=filename, purpose=purpose, owner=owner)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def publish(self, file_id: str, *, filename: str, purpose: str, owner: str) -> StoredFile:
        """Create a file from data already written to its `data_path`."""
        now = int(time.time())
        name = "".join(char for char in filename if char.isprintable())[:_MAX_NAME_CHARS]
        file = StoredFile(
            id=file_id,
            bytes=self.data_path(file_id).stat().st_size,
            created_at=now,
            expires_at=now + KEPT_S,
            filename=name,
            purpose=purpose,
            owner=owner,
        )
        self._records.write(file_id, asdict(file))
        return file

    def find(self, file_id: str, viewer: str | None) -> StoredFile:
        """Return a file. Raises HTTPException 404."""
        record = self._records.read(file_id)
        file = StoredFile(**record) if record else None
        if file is None or viewer not in (None, file.owner):
            raise HTTPException(404, f"There is no file {file_id[:64]!r}.")
        return file

    def seen_by(self, viewer: str | None, purpose: str | None = None) -> list[StoredFile]:
        """Return the files that a viewer sees, the newest first; delete expired files."""
        now, kept = time.time(), []
        for file in self._all():
            if file.expires_at <= now:
                self._records.delete(file.id, ".data")
            elif viewer in (None, file.owner) and purpose in (None, file.purpose):
                kept.append(file)
        return sorted(kept, key=lambda file: (file.created_at, file.id), reverse=True)

    def delete(self, file_id: str, viewer: str | None) -> None:
        """Delete a file. Raises HTTPException 404."""
        self.find(file_id, viewer)
        self._records.delete(file_id, ".data")

    def discard(self, file_id: str) -> None:
        """Delete a file if it exists."""
        self._records.delete(file_id, ".data")

    def _all(self) -> list[StoredFile]:
        records = map(self._records.read, self._records.ids())
        return [StoredFile(**record) for record in records if record]

    def _check_room(self) -> None:
        files = self.seen_by(None)
        if len(files) >= MAX_FILES or sum(file.bytes for file in files) >= MAX_STORE_BYTES:
            raise InvalidRequest(
                "The server's store of files is full; delete files that are no longer needed.",
                "file",
                "store_full",
            )
