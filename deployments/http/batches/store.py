"""Batches as records on disk, which several replicas share.

Any replica may create a batch, show it, or mark it as cancelled. Only the replica that holds a
batch's lock runs it and writes its record. The lock ends with the process, so another replica
resumes the batch of a failed replica.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from remora.configs.errors import QueueFull
from remora.deployments.http.batches.files import KEPT_S, FileStore
from remora.deployments.http.batches.input import BATCH_PATHS
from remora.deployments.http.batches.results import Usage
from remora.deployments.http.core.json_records import Records

WINDOW_S = 24 * 3600
MAX_OPEN_BATCHES = 64
_TIMES = tuple(
    f"{status}_at"
    for status in (
        *("in_progress", "finalizing", "completed", "failed"),
        *("expired", "cancelling", "cancelled"),
    )
)
_ENDINGS = (".cancel", ".starts", ".lock")  # of the other files of a batch
_ENDED = frozenset({"completed", "failed", "cancelled", "expired"})


@dataclass(slots=True, eq=False, kw_only=True)
class Batch:
    """One batch.

    owner:          the owner of the batch and its files
    tenant:         whose limits count; "" = callers without a tenant's key
    output, error:  ids of the result files, generated in advance
    times:          Unix time in seconds of each status, by OpenAI's names (`in_progress_at`)
    errors:         faults of the input file, if the batch failed because of them
    expired:        failed lines that did not start in time
    usage:          token counts of its answers, as OpenAI's object
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    output: str
    error: str
    tenant: str = ""
    metadata: dict[str, str] | None = None
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    expired: int = 0
    model: str | None = None
    usage: dict[str, Any] = field(default_factory=lambda: Usage().show())

    @property
    def has_ended(self) -> bool:
        """Whether the batch has its final status."""
        return self.status in _ENDED

    def become(self, status: str) -> None:
        """Change the status and record the time."""
        self.status = status
        self.times[f"{status}_at"] = int(time.time())

    def show(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output if self.has_ended and self.completed else None,
            "error_file_id": self.error if self.has_ended and self.failed else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **dict.fromkeys(_TIMES),
            **self.times,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": self.usage,
            "metadata": self.metadata,
        }


class BatchStore:
    """Batches in a folder that also holds their files. Methods block.

    files:  input and result files
    """

    def __init__(self, folder: Path) -> None:
        self.files = FileStore(folder / "files")
        self._records = Records(folder / "batches", "batch_")
        self._ended: set[str] = set()

    def add(
        self,
        *,
        endpoint: str,
        input_file_id: str,
        owner: str,
        tenant: str = "",
        metadata: dict[str, str] | None,
        model: str | None = None,
        total: int = 0,
    ) -> Batch:
        """Create a batch. Raises QueueFull if MAX_OPEN_BATCHES batches are unfinished."""
        if len(self.unfinished()) >= MAX_OPEN_BATCHES:
            message = f"{MAX_OPEN_BATCHES} batches are under way; cancel one, or wait for its end."
            raise QueueFull(message, 60.0)
        now = int(time.time())
        batch = Batch(
            id=self._records.new_id(),
            owner=owner,
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=now,
            expires_at=now + WINDOW_S,
            output=self.files.new_id(),
            error=self.files.new_id(),
            model=model,
            metadata=metadata,
            total=total,
        )
        self.save(batch)
        return batch

    def save(self, batch: Batch) -> None:
        """Write the record of a batch."""
        self._records.write(batch.id, asdict(batch))

    def read(self, batch_id: str) -> Batch | None:
        """Return a batch from its record; None if there is none."""
        record = self._records.read(batch_id)
        return Batch(**record) if record else None

    def find(
        self, batch_id: str, viewer: str | None, endpoints: Collection[str] = BATCH_PATHS
    ) -> Batch:
        """Return a batch of these endpoints. Raises HTTPException 404."""
        batch = self.read(batch_id)
        is_seen = batch is not None and viewer in (None, batch.owner)
        if batch is None or not is_seen or batch.endpoint not in endpoints:
            raise HTTPException(404, f"There is no batch {batch_id[:64]!r}.")
        if not batch.has_ended and self.is_cancelled(batch_id):
            batch.status = "cancelling"
        return batch

    def seen_by(self, viewer: str | None, endpoints: Collection[str] = BATCH_PATHS) -> list[Batch]:
        """Return the batches of these endpoints that a viewer sees, the newest first."""
        batches = [batch for batch in map(self.read, self._records.ids()) if batch]
        seen = [
            batch
            for batch in batches
            if viewer in (None, batch.owner) and batch.endpoint in endpoints
        ]
        return sorted(seen, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def unfinished(self) -> list[Batch]:
        """Return unfinished batches, the oldest first; delete ended batches older than KEPT_S."""
        found = []
        for batch_id in self._records.ids():
            batch = None if batch_id in self._ended else self.read(batch_id)
            if batch and batch.has_ended:
                self._ended.add(batch_id)
                if batch.created_at + KEPT_S < time.time():
                    self._records.delete(batch_id, *_ENDINGS)
            elif batch:
                found.append(batch)
        return sorted(found, key=lambda batch: (batch.created_at, batch.id))

    def cancel(self, batch_id: str) -> None:
        """Mark a batch as cancelled; the replica that runs it stops."""
        self._records.path(batch_id, ".cancel").touch()

    def cancelled_at(self, batch_id: str) -> float | None:
        """Return the Unix time at which a batch was marked as cancelled; None = it is not."""
        try:
            return self._records.path(batch_id, ".cancel").stat().st_mtime
        except FileNotFoundError:
            return None

    def delete(self, batch: Batch) -> None:
        """Delete an ended batch and its files."""
        self._records.delete(batch.id, *_ENDINGS)
        for file_id in (batch.input_file_id, batch.output, batch.error):
            self.files.discard(file_id)

    def is_cancelled(self, batch_id: str) -> bool:
        """Return whether a batch is marked as cancelled."""
        return self._records.path(batch_id, ".cancel").exists()

    def starts_path(self, batch_id: str) -> Path:
        """Return the path of the file that records line starts."""
        return self._records.path(batch_id, ".starts")

    @contextmanager
    def claim(self, batch_id: str) -> Iterator[Batch | None]:
        """Hold a batch's lock and yield the batch; None if locked elsewhere or ended."""
        with self._records.path(batch_id, ".lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            batch = self.read(batch_id)  # may have changed since it was listed
            yield None if batch is None or batch.has_ended else batch
