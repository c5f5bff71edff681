"""A checked request of any API: requests for the engine, and the response from their outputs."""

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

    rid:       name of the request, from the caller or generated
    requests:  one for each prompt
    streams:   whether the response is streamed
    """

    rid: str
    requests: tuple[Request, ...]
    streams: bool = False

    @abstractmethod
    async def result(self, outputs: OutputStream) -> Any:
        """Return the whole response."""

    def writer(self) -> ChunkWriter:
        """Return the writer of a streamed response."""
        raise NotImplementedError("this API does not stream")
