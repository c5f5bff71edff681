"""The adapters that a replica serves, for request handlers: fixed or dynamic. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NoReturn

from remora.configs.errors import InvalidRequest, RemoraError
from remora.configs.sections.lora import LoraSection
from remora.deployments.adapters.manager_handle import Manager
from remora.lora.adapter_cache import AdapterCache

# An adapter that another replica serves already may take this long to be served here.
NEWS_S = 5.0


class FixedAdapters:
    """The adapters of the configuration, loaded at the start."""

    def __init__(self, section: LoraSection) -> None:
        names = [adapter.name for adapter in section.adapters]
        lora_ids = [0] if section.merges else range(1, len(names) + 1)
        self._lora_ids: Mapping[str, int] = dict(zip(names, lora_ids, strict=True))
        self._sources = {adapter.name: str(adapter.path) for adapter in section.adapters}

    @property
    def names(self) -> list[str]:
        """Names that requests may use."""
        return list(self._lora_ids)

    async def find(self, name: str) -> int | None:
        """Return the lora_id of a name; None = no such adapter."""
        return self._lora_ids.get(name)

    def source(self, name: str) -> str | None:
        """Return the path of an adapter; None = no such adapter."""
        return self._sources.get(name)

    async def describe(self) -> dict[str, Any]:
        """Return their names."""
        return {"adapters": [{"name": name, "owner": "config"} for name in self._lora_ids]}

    def resident(self) -> list[str]:
        """Return all names: nothing is evicted."""
        return self.names

    def stats(self) -> Mapping[str, float]:
        """Return no counters."""
        return {}

    @property
    def manager(self) -> NoReturn:
        """Raise InvalidRequest."""
        raise InvalidRequest(
            "This server's adapters are fixed at the start; set lora.dynamic: true in its "
            "configuration to load and unload adapters while it serves.",
            code="adapters_are_fixed",
        )


class DynamicAdapters:
    """The adapters that the manager's registry holds.

    has_repo:  whether a name that is not served may be in the repository
    """

    def __init__(self, adapter_cache: AdapterCache, manager: Manager, *, has_repo: bool) -> None:
        self._adapter_cache = adapter_cache
        self._has_repo = has_repo
        self.manager = manager

    @property
    def names(self) -> list[str]:
        """Names that requests may use."""
        return self._adapter_cache.names

    async def find(self, name: str) -> int | None:
        """Return the lora_id of a name, after a look into the repository if necessary."""
        lora_id = self._adapter_cache.lora_id(name)
        if lora_id is not None or not self._has_repo:
            return lora_id
        try:
            if not await self.manager.resolve(name):
                return None
        except RemoraError:
            return None
        try:
            async with asyncio.timeout(NEWS_S):
                while (lora_id := self._adapter_cache.lora_id(name)) is None:
                    await self._adapter_cache.changed(self._adapter_cache.num_changes)
        except TimeoutError:
            return None
        return lora_id

    def source(self, name: str) -> str | None:
        """Return the folder or URL of an adapter; None = no such adapter."""
        return self._adapter_cache.source(name)

    async def describe(self) -> dict[str, Any]:
        """Return the manager's description of each adapter and replica."""
        return await self.manager.adapters()

    def resident(self) -> list[str]:
        """Return the names of the adapters in memory, the most recently used first."""
        return self._adapter_cache.resident

    def stats(self) -> Mapping[str, float]:
        """Return the cache's counters."""
        return self._adapter_cache.stats


Adapters = FixedAdapters | DynamicAdapters
