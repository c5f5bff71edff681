"""Adapters come and go at all ranks of a replica.

Each rank reads the files where it is placed, and keeps its share. An adapter is there when it is
there at every rank, and gone when the engine has no step left that could ask for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Protocol

from remora.configs.errors import InvalidAdapter
from remora.engine.protocols import AdapterFacts, AdapterPool
from remora.lora.sources import Sources

if TYPE_CHECKING:  # torch is imported when it is needed
    from remora.engine.client import LocalEngineClient


class OtherRanks(Protocol):
    """The ranks other than 0."""

    def prepare_adapter(self, lora_id: int, source: str) -> list[Awaitable[AdapterFacts]]:
        """Load an adapter at each. What goes wrong at one of them its answer raises."""
        ...

    async def discard_adapter(self, lora_id: int) -> None:
        """Forget it at each."""
        ...


class RankLoader:
    """Loader over the ranks of one replica.

    pool:    of rank 0
    others:  None = there are none
    """

    def __init__(
        self,
        pool: AdapterPool,
        engine: LocalEngineClient,
        sources: Sources,
        others: OtherRanks | None = None,
    ) -> None:
        self._pool = pool
        self._engine = engine
        self._sources = sources
        self._others = others

    async def prepare(self, version: int, source: str) -> AdapterFacts:
        """Load at all ranks. Raises what goes wrong at any; nothing is left behind then."""
        own = asyncio.to_thread(prepare, self._pool, self._sources, version, source)
        others = [] if self._others is None else self._others.prepare_adapter(version, source)
        # All are waited for: one that came later than the discarding would stay for ever.
        found = await asyncio.gather(own, *others, return_exceptions=True)
        failures = [each for each in found if isinstance(each, BaseException)]
        facts = [each for each in found if not isinstance(each, BaseException)]
        if not failures and len({each.digest for each in facts}) > 1:
            failures = [InvalidAdapter(f"{source} holds other files on one node than on another")]
        if failures:
            await self._discard(version)
            raise next((e for e in failures if isinstance(e, InvalidAdapter)), failures[0])
        return facts[0]

    async def discard(self, version: int) -> None:
        """Forget a version at all ranks, once no step can ask for it."""
        await self._engine.forget_adapter(version)
        await self._discard(version)

    def pin(self, version: int, *, pinned: bool) -> None:
        """Let a version stay in its slot, or not."""
        self._engine.pin_adapter(version, pinned=pinned)

    async def _discard(self, version: int) -> None:
        self._pool.discard(version)
        if self._others is not None:
            await self._others.discard_adapter(version)


def prepare(pool: AdapterPool, sources: Sources, version: int, source: str) -> AdapterFacts:
    """Fetch an adapter and load it at one rank; in any thread."""
    return pool.prepare(version, sources.fetch(source))
