"""Assembles the parts of a replica with `lora.dynamic`: adapter cache, loader, client and sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remora.configs.errors import EngineError
from remora.configs.schema import ServeConfig
from remora.deployments.adapters.client import AdaptingClient
from remora.deployments.adapters.manager_handle import Manager
from remora.deployments.adapters.manager_sync import AdapterSync
from remora.deployments.adapters.served_adapters import DynamicAdapters
from remora.deployments.ranks.adapters import RankLoader
from remora.deployments.ranks.team import RayTeam
from remora.lora.adapter_cache import AdapterCache
from remora.lora.sources import Sources

if TYPE_CHECKING:  # torch is imported when it is needed
    from remora.engine.launch import LaunchedEngine


class ReplicaAdapters:
    """The adapters of a replica with `lora.dynamic`. Create it on the replica's event loop.

    client:  the engine's client, which holds each request's adapter
    served:  the adapters for request handlers
    """

    def __init__(
        self,
        config: ServeConfig,
        launched: LaunchedEngine,
        others: RayTeam | None,
        manager: Manager,
        replica: str,
    ) -> None:
        pool = launched.built.adapters
        if pool is None:
            raise EngineError("The engine was built without adapter slots.")
        engine, lora = launched.client, config.lora
        loader = RankLoader(pool, engine, Sources.configured(lora), others)
        self.adapter_cache = AdapterCache(
            loader, max_loaded=lora.max_loaded_loras, by_use=lora.eviction == "lru"
        )
        self.client = AdaptingClient(engine, self.adapter_cache, launched.built.plan)
        self.served = DynamicAdapters(self.adapter_cache, manager, has_repo=lora.repo is not None)
        self._sync = AdapterSync(
            self.adapter_cache, manager, replica, slots=engine.adapter_slots, end=self.client.end
        )

    async def begin(self) -> None:
        """Load the adapters to serve from the start. Raises ConfigError for invalid ones."""
        await self._sync.begin()

    def check(self) -> None:
        """Raise the error that ended the synchronisation with the manager, if one did."""
        self._sync.check()

    def close(self) -> None:
        """Stop the synchronisation."""
        self._sync.close()
