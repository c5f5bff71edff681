"""A checked request of any API: requests for the engine, and the response from their outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from remora.deployments.http.core.sse import ChunkWriter
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.engine.types import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(ABC):
    """One checked request.

    context:   its id, its caller and more
    requests:  one for each prompt
    streams:   whether the response is streamed
    """

    context: RequestContext
    requests: tuple[Request, ...]
    streams: bool = False

    @property
    def rid(self) -> str:
        """The request's id."""
        return self.context.request_id

    @abstractmethod
    async def result(self, outputs: OutputStream) -> Any:
        """Return the whole response."""

    def writer(self) -> ChunkWriter:
        """Return the writer of a streamed response."""
        raise NotImplementedError("this API does not stream")
