"""A checked request of any API: what the engine gets, and what its outputs become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from remora.deployments.http.core.sse import ChunkWriter
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.engine.types import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(ABC):
    """One checked request.

    rid:       the caller's name of the request, or one that was drawn
    requests:  one for each prompt
    streams:   whether the client wants chunks
    """

    rid: str
    requests: tuple[Request, ...]
    streams: bool = False

    @abstractmethod
    async def result(self, outputs: OutputStream) -> Any:
        """Return the whole answer."""

    def writer(self) -> ChunkWriter:
        """Return the writer of a streamed answer."""
        raise NotImplementedError("this API does not stream")
