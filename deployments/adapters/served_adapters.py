"""The adapters that a replica serves, as request handlers see them: fixed ones, or ones that come.

Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

from remora.configs.errors import InvalidRequest, RemoraError
from remora.configs.sections.lora import LoraSection
from remora.deployments.adapters.manager_handle import Manager
from remora.lora.adapter_cache import AdapterCache

# What another replica has been told of a moment ago this one may not know yet.
NEWS_S = 5.0


class Adapters(Protocol):
    """What is served beside the base model."""

    @property
    def names(self) -> list[str]:
        """What may be asked for."""
        ...

    async def find(self, name: str) -> int | None:
        """Return the instance in the engine that a name means; None = there is none."""
        ...

    async def told(self) -> dict[str, Any]:
        """Return what is known of each, for operators."""
        ...

    def resident(self) -> list[str]:
        """Return the names of those in memory."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Return this replica's counters; none where adapters are fixed."""
        ...

    @property
    def manager(self) -> Manager:
        """Who loads and unloads. Raises InvalidRequest where adapters are fixed."""
        ...


class FixedAdapters:
    """Those that were named at the start."""

    def __init__(self, section: LoraSection) -> None:
        names = [adapter.name for adapter in section.adapters]
        lora_ids = [0] if section.merges else range(1, len(names) + 1)
        self._lora_ids: Mapping[str, int] = dict(zip(names, lora_ids, strict=True))

    @property
    def names(self) -> list[str]:
        """What may be asked for."""
        return list(self._lora_ids)

    async def find(self, name: str) -> int | None:
        """Return the instance in the engine that a name means."""
        return self._lora_ids.get(name)

    async def told(self) -> dict[str, Any]:
        """Return their names."""
        return {"adapters": [{"name": name, "owner": "config"} for name in self._lora_ids]}

    def resident(self) -> list[str]:
        """Return all: they stay."""
        return self.names

    def stats(self) -> Mapping[str, float]:
        """Return nothing: nothing happens."""
        return {}

    @property
    def manager(self) -> NoReturn:
        """There is none."""
        raise InvalidRequest(
            "This server's adapters are those that it was started with; set lora.dynamic: true in "
            "its configuration to load and unload adapters while it serves.",
            code="adapters_are_fixed",
        )


class ComingAdapters:
    """Those that the manager wants.

    looks_further:  whether a name that is not served may be in the repository
    """

    def __init__(
        self, adapter_cache: AdapterCache, manager: Manager, *, looks_further: bool
    ) -> None:
        self._adapter_cache = adapter_cache
        self._looks_further = looks_further
        self.manager = manager

    @property
    def names(self) -> list[str]:
        """What may be asked for."""
        return self._adapter_cache.names

    async def find(self, name: str) -> int | None:
        """Return the version that a name means, looked for in the repository if need be."""
        version = self._adapter_cache.version(name)
        if version is not None or not self._looks_further:
            return version
        try:
            if not await self.manager.resolve(name):
                return None
        except RemoraError:
            return None
        return await self._soon(name)

    async def told(self) -> dict[str, Any]:
        """Return what the manager knows of each."""
        return await self.manager.adapters()

    def resident(self) -> list[str]:
        """Return the names of those in memory, the latest used first."""
        return self._adapter_cache.resident

    def stats(self) -> Mapping[str, float]:
        """Return the catalogue's counters."""
        return self._adapter_cache.stats

    async def _soon(self, name: str) -> int | None:
        """Wait until the news of a name has come."""
        try:
            async with asyncio.timeout(NEWS_S):
                while (version := self._adapter_cache.version(name)) is None:
                    await self._adapter_cache.changed(self._adapter_cache.num_changes)
        except TimeoutError:
            return None
        return version
