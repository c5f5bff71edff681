"""Loads and frees adapters at all ranks of a replica.

Each rank reads the files on its own node and keeps its shard. An adapter is usable once every rank
has loaded it, and it is freed once no step of the engine can use it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from remora.configs.errors import InvalidAdapter
from remora.engine.protocols import AdapterFacts, AdapterPool
from remora.lora.sources import Sources

if TYPE_CHECKING:  # torch is imported when it is needed
    from remora.deployments.ranks.team import RayTeam
    from remora.engine.client import LocalEngineClient


class RankLoader:
    """Loader over the ranks of one replica.

    pool:    of rank 0
    others:  the ranks other than 0; None = a single rank
    """

    def __init__(
        self,
        pool: AdapterPool,
        engine: LocalEngineClient,
        sources: Sources,
        others: RayTeam | None = None,
    ) -> None:
        self._pool = pool
        self._engine = engine
        self._sources = sources
        self._others = others

    async def prepare(self, lora_id: int, source: str) -> AdapterFacts:
        """Load at all ranks. If any fails, raise its error and keep nothing."""
        own = asyncio.to_thread(self._prepare, lora_id, source)
        others = [] if self._others is None else self._others.prepare_adapter(lora_id, source)
        # Wait for all: a load that ended after the discard would never be freed.
        found = await asyncio.gather(own, *others, return_exceptions=True)
        failures = [each for each in found if isinstance(each, BaseException)]
        facts = [each for each in found if not isinstance(each, BaseException)]
        if not failures and len({each.digest for each in facts}) > 1:
            failures = [InvalidAdapter(f"the files of {source} differ between nodes")]
        if failures:
            await self._discard(lora_id)
            raise next((e for e in failures if isinstance(e, InvalidAdapter)), failures[0])
        return facts[0]

    async def discard(self, lora_id: int) -> None:
        """Free an adapter at all ranks, once no step can use it."""
        await self._engine.forget_adapter(lora_id)
        await self._discard(lora_id)

    def pin(self, lora_id: int, *, pinned: bool) -> None:
        """Keep an adapter in its slot, or allow its eviction."""
        self._engine.pin_adapter(lora_id, pinned=pinned)

    def _prepare(self, lora_id: int, source: str) -> AdapterFacts:
        return self._pool.prepare(lora_id, self._sources.fetch(source))

    async def _discard(self, lora_id: int) -> None:
        self._pool.discard(lora_id)
        if self._others is not None:
            await self._others.discard_adapter(lora_id)
