"""Replica and manager over calls that fail, that come late, and that come in another order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.configs.errors import Unavailable
from remora.deployments.adapters import manager as manager_module
from remora.deployments.adapters import manager_sync as syncing_module
from remora.deployments.adapters.manager import LoRAManager
from remora.deployments.adapters.manager_sync import AdapterSync
from remora.lora.adapter_cache import AdapterCache
from remora.lora.records import Desired, ReplicaReport
from tests.deployments.adapters.test_manager import make_manager
from tests.lora.fake_loader import FakeLoader
from tests.moments import end, nothing_left, steps

NAMES = ("a", "b", "c")
CALLS = ("well", "well", "lost before", "lost after", "late", "later")
ACTIONS = st.lists(
    st.tuples(st.sampled_from(("load", "unload", "use", "new manager")), st.sampled_from(NAMES)),
    max_size=12,
)


@dataclass
class Link:
    """The manager as a replica reaches it; `fates` is what becomes of its calls, one by one."""

    manager: LoRAManager
    fates: list[str] = field(default_factory=list)

    async def sync(self, replica: str, report: ReplicaReport, *, waits: bool = True) -> Desired:
        fate = self.fates.pop() if self.fates else "well"
        if fate == "lost before":
            raise Unavailable("lost")
        await asyncio.sleep({"late": 0.002, "later": 0.005}.get(fate, 0))
        desired = await self.manager.sync(replica, report, waits=waits)
        if fate == "lost after":
            raise Unavailable("lost")
        return desired

    def __getattr__(self, method: str) -> Any:
        return getattr(self.manager, method)


async def no_slots() -> Mapping[int, int]:
    return {}


async def no_end(version: int) -> None:
    pass


async def run(actions: list[tuple[str, str]], fates: list[str]) -> None:
    folder = Path("/")
    link = Link(await make_manager(folder))
    adapter_cache = AdapterCache(FakeLoader(), max_loaded=2)
    sync = AdapterSync(adapter_cache, link, "r", slots=no_slots, end=no_end)
    await sync.begin()
    link.fates = fates
    managers = [link.manager]
    for action, name in actions:
        registry = link.manager._registry
        match action:
            case "load":
                registry.commit(registry.stage(name, f"/{name}", owner="api").lora_id, "")
            case "unload" if registry.find(name):
                registry.remove(name)
            case "use" if (version := adapter_cache.lora_id(name)) is not None:
                async with adapter_cache.use(version):
                    await asyncio.sleep(0.001)
            case "new manager":
                link.manager = await make_manager(folder)
                managers.append(link.manager)
        link.manager._wakeup.wake()
        await asyncio.sleep(0.001)

    link.fates.clear()

    def is_known() -> bool:
        told = link.manager._replicas.get("r")
        server = {record.name: record.lora_id for record in link.manager._registry.records}
        return (
            told is not None
            and told.revision == link.manager._registry.revision
            and told.reports == {each.lora_id: each for each in adapter_cache.reports()}
            and {name: adapter_cache.lora_id(name) for name in adapter_cache.names} == server
        )

    async with asyncio.timeout(10):
        while not is_known():
            await asyncio.sleep(0.002)
    sync.close()
    for manager in managers:
        manager._watching.cancel()
    await asyncio.sleep(0)


@settings(deadline=None, max_examples=60)
@given(actions=ACTIONS, fates=st.lists(st.sampled_from(CALLS), max_size=30))
def test_whatever_becomes_of_calls_both_know_the_same_in_the_end(
    actions: list[tuple[str, str]], fates: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager_module, "log_through_serve", lambda: None)
        patch.setattr(manager_module, "SYNC_S", 0.02)
        for name in ("RETRY_S", "GATHER_S", "SOON_S"):
            patch.setattr(syncing_module, name, 0.001)
        asyncio.run(run(actions, fates))


async def test_an_exchange_that_ends_at_any_moment_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manager_module, "log_through_serve", lambda: None)
    monkeypatch.setattr(syncing_module, "GATHER_S", 0)
    manager = await make_manager(Path("/"))
    await steps(1)
    async with nothing_left():
        for moment in range(30):
            adapter_cache = AdapterCache(FakeLoader(), max_loaded=2)
            sync = AdapterSync(adapter_cache, Link(manager), "r", slots=no_slots, end=no_end)
            await sync.begin()
            await steps(moment)
            sync.close()
            assert sync._running is not None
            await end(sync._running)
            await adapter_cache.settled()
    manager._watching.cancel()
