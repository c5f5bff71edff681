"""The engine's client with adapters that come and go: a request's adapter is held while it runs.

Requests without an adapter pass through untouched.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from remora.configs.errors import QueueFull
from remora.configs.planning.plan import EnginePlan
from remora.deployments.scoped_task import scoped_task
from remora.engine.protocols import EngineClient
from remora.engine.types import EngineStats, FinishReason, Output, Request
from remora.lora.adapter_cache import AdapterCache


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A request whose adapter is being loaded."""

    request: Request
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def result(self, use: Coroutine[Any, Any, int]) -> int | None:
        """Wait for the version that is held; None = the request was aborted first."""
        async with scoped_task(use) as using, scoped_task(self.aborted.wait()) as aborting:
            await asyncio.wait({using, aborting}, return_when=asyncio.FIRST_COMPLETED)
        return None if self.aborted.is_set() else using.result()


class AdaptingClient:
    """EngineClient over another one. `Request.lora_id` is a version of the catalogue's."""

    def __init__(self, engine: EngineClient, adapter_cache: AdapterCache, plan: EnginePlan) -> None:
        self._engine = engine
        self._adapter_cache = adapter_cache
        self._plan = plan
        self._waiting: dict[int, _Waiting] = {}
        self._running: dict[int, set[str]] = {}  # version -> ids of requests

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """See EngineClient.generate; raises what Catalogue.use raises, too."""
        return self._adapted(request) if request.lora_id else self._engine.generate(request)

    async def abort(self, request_id: str | None) -> int:
        """Abort one request (None: all), also those that wait for their adapters."""
        waiting = [w for w in self._waiting.values() if request_id in (None, w.request.request_id)]
        for each in waiting:
            each.aborted.set()
        return len(waiting) + await self._engine.abort(request_id)

    async def end(self, version: int) -> None:
        """Abort what runs with a version."""
        for request_id in tuple(self._running.get(version, ())):
            await self._engine.abort(request_id)

    async def is_waiting(self, request_id: str) -> bool:
        """Return whether an open request waits for its turn, or for its adapter."""
        waits = any(w.request.request_id == request_id for w in self._waiting.values())
        return waits or await self._engine.is_waiting(request_id)

    async def flush_cache(self) -> bool:
        """Drop the prefix cache; False while requests are running."""
        return await self._engine.flush_cache()

    async def page_hashes(self, limit: int) -> bytes:
        """Return hashes of cached pages."""
        return await self._engine.page_hashes(limit)

    def limit_queue(self, plan: EnginePlan) -> None:
        """Refuse requests beyond this plan's limits of the queue from now on."""
        self._plan = plan
        self._engine.limit_queue(plan)

    def stats(self) -> EngineStats:
        """Return the newest counters."""
        return self._engine.stats()

    def check_health(self) -> None:
        """Raise EngineError if the engine has failed."""
        self._engine.check_health()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the open ones."""
        return await self._engine.drain(timeout_s)

    def close(self) -> None:
        """Stop the engine's loop."""
        self._engine.close()

    async def _adapted(self, request: Request) -> AsyncGenerator[Output, None]:
        async with AsyncExitStack() as held:
            with self._queued(request) as waiting:
                version = await waiting.result(
                    held.enter_async_context(self._adapter_cache.use(request.lora_id))
                )
            if version is None:
                for index in range(request.sampling.n):
                    yield Output(
                        index=index, token_ids=(), text="", finish_reason=FinishReason.ABORT
                    )
                return
            adapted = replace(request, lora_id=version)
            with self._noted(version, request.request_id):
                async with aclosing(self._engine.generate(adapted)) as outputs:
                    async for output in outputs:
                        yield output

    @contextmanager
    def _queued(self, request: Request) -> Iterator[_Waiting]:
        """Count a request among those that wait for their adapters. Raises QueueFull."""
        waiting = _Waiting(request)
        num_waiting = sum(w.request.sampling.n for w in (*self._waiting.values(), waiting))
        limit = self._plan.max_open_sequences
        if num_waiting > limit:
            raise QueueFull(
                f"{num_waiting} sequences wait for their adapters; the limit is {limit}."
            )
        self._waiting[id(waiting)] = waiting
        try:
            yield waiting
        finally:
            del self._waiting[id(waiting)]

    @contextmanager
    def _noted(self, version: int, request_id: str) -> Iterator[None]:
        """Remember that a request runs with a version."""
        running = self._running.setdefault(version, set())
        running.add(request_id)
        try:
            yield
        finally:
            running.discard(request_id)
            if not running:
                self._running.pop(version, None)
