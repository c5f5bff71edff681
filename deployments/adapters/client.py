"""The engine's client for a replica whose adapters change: holds a request's adapter while it runs.

Requests without an adapter pass through unchanged.
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
from remora.engine.types import FinishReason, Output, Request
from remora.lora.adapter_cache import AdapterCache


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingRequest:
    """A request whose adapter is being loaded."""

    request: Request
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def result(self, use: Coroutine[Any, Any, int]) -> int | None:
        """Wait for the lora_id that is held; None = the request was aborted first."""
        async with scoped_task(use) as using, scoped_task(self.aborted.wait()) as aborting:
            await asyncio.wait({using, aborting}, return_when=asyncio.FIRST_COMPLETED)
        return None if self.aborted.is_set() else using.result()


class AdaptingClient:
    """EngineClient over another one that holds each request's adapter in an AdapterCache."""

    def __init__(self, engine: EngineClient, adapter_cache: AdapterCache, plan: EnginePlan) -> None:
        self._engine = engine
        self._adapter_cache = adapter_cache
        self._plan = plan
        self._waiting: dict[int, _WaitingRequest] = {}
        self._running: dict[int, set[str]] = {}  # lora_id -> request ids

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """See EngineClient.generate; also raises the errors of AdapterCache.use."""
        return self._adapted(request) if request.lora_id else self._engine.generate(request)

    async def abort(self, request_id: str | None) -> int:
        """Abort one request (None: all), also while it waits for its adapter."""
        waiting = [w for w in self._waiting.values() if request_id in (None, w.request.request_id)]
        for each in waiting:
            each.aborted.set()
        return len(waiting) + await self._engine.abort(request_id)

    async def end(self, lora_id: int) -> None:
        """Abort the running requests of an adapter."""
        for request_id in tuple(self._running.get(lora_id, ())):
            await self._engine.abort(request_id)

    async def is_waiting(self, request_id: str) -> bool:
        """Return whether an open request waits in the queue or for its adapter."""
        waits = any(w.request.request_id == request_id for w in self._waiting.values())
        return waits or await self._engine.is_waiting(request_id)

    def limit_queue(self, plan: EnginePlan) -> None:
        """Apply this plan's queue limits from now on."""
        self._plan = plan
        self._engine.limit_queue(plan)

    def __getattr__(self, name: str) -> Any:
        """Return a method of the engine's own client, for all that adapters do not change."""
        return getattr(self._engine, name)

    async def _adapted(self, request: Request) -> AsyncGenerator[Output, None]:
        async with AsyncExitStack() as held:
            with self._queued(request) as waiting:
                lora_id = await waiting.result(
                    held.enter_async_context(self._adapter_cache.use(request.lora_id))
                )
            if lora_id is None:
                for index in range(request.sampling.n):
                    yield Output(
                        index=index, token_ids=(), text="", finish_reason=FinishReason.ABORT
                    )
                return
            adapted = replace(request, lora_id=lora_id)
            with self._tracked(lora_id, request.request_id):
                async with aclosing(self._engine.generate(adapted)) as outputs:
                    async for output in outputs:
                        yield output

    @contextmanager
    def _queued(self, request: Request) -> Iterator[_WaitingRequest]:
        """Register a request that waits for its adapter. Raises QueueFull."""
        waiting = _WaitingRequest(request)
        num_waiting = sum(
            other.request.sampling.n
            for other in (*self._waiting.values(), waiting)
            if other.request.tenant.name == request.tenant.name
        )
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
    def _tracked(self, lora_id: int, request_id: str) -> Iterator[None]:
        """Register a running request of an adapter."""
        running = self._running.setdefault(lora_id, set())
        running.add(request_id)
        try:
            yield
        finally:
            running.discard(request_id)
            if not running:
                self._running.pop(lora_id, None)
