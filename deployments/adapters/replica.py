"""Adapters that come and go at one replica: catalogue, loader, client and manager, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remora.configs.errors import EngineError
from remora.configs.schema import ServeConfig
from remora.deployments.adapters.client import AdaptingClient
from remora.deployments.adapters.manager_handle import Manager
from remora.deployments.adapters.manager_sync import AdapterSync
from remora.deployments.adapters.served_adapters import ComingAdapters
from remora.deployments.ranks.adapters import OtherRanks, RankLoader
from remora.lora.adapter_cache import AdapterCache
from remora.lora.sources import Sources

if TYPE_CHECKING:  # torch is imported when it is needed
    from remora.engine.launch import LaunchedEngine


class ReplicaAdapters:
    """What a replica with `lora.dynamic` has more than others. Make it on its event loop.

    client:   the engine's, which holds adapters for requests
    present:  what request handlers see
    """

    def __init__(
        self,
        config: ServeConfig,
        launched: LaunchedEngine,
        others: OtherRanks | None,
        manager: Manager,
        replica: str,
    ) -> None:
        pool = launched.built.adapters
        if pool is None:
            raise EngineError("The engine was built without room for adapters.")
        engine, lora = launched.client, config.lora
        loader = RankLoader(pool, engine, Sources.configured(lora), others)
        self.adapter_cache = AdapterCache(
            loader, max_loaded=lora.max_loaded_loras, by_use=lora.eviction == "lru"
        )
        self.client = AdaptingClient(engine, self.adapter_cache, launched.built.plan)
        self.present = ComingAdapters(
            self.adapter_cache, manager, looks_further=lora.repo is not None
        )
        self._sync = AdapterSync(
            self.adapter_cache, manager, replica, slots=engine.adapter_slots, end=self.client.end
        )

    async def begin(self) -> None:
        """Load what is wanted at the start. Raises ConfigError for what cannot be served."""
        await self._sync.begin()

    def check(self) -> None:
        """Raise what has ended the exchange with the manager."""
        self._sync.check()

    def close(self) -> None:
        """End the exchange."""
        self._sync.close()
