"""The manager and several replicas: what one of them cannot serve none does."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import InvalidAdapter, InvalidRequest, Unavailable, UnknownModel
from remora.deployments.adapters import manager as module
from remora.deployments.adapters import manager_sync
from remora.deployments.adapters.manager import LoRAManager
from remora.deployments.adapters.manager_sync import AdapterSync
from remora.lora.adapter_cache import AdapterCache
from tests.lora.fake_loader import FakeLoader
from tests.moments import cancelled, nothing_left, steps


@pytest.fixture(autouse=True)
def _log_lines_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a Serve replica they go where Serve's go, for as long as the process lives.
    monkeypatch.setattr(module, "log_through_serve", lambda: None)


@dataclass(eq=False)
class Replica:
    """A replica without an engine."""

    name: str
    loader: FakeLoader
    adapter_cache: AdapterCache
    sync: AdapterSync
    ended: list[int]

    async def use(self, name: str) -> int:
        version = self.adapter_cache.lora_id(name)
        assert version is not None, f"{name} is not served at {self.name}"
        async with self.adapter_cache.use(version) as held:
            return held


class Cluster:
    """A manager and replicas on one event loop; the manager may be exchanged."""

    def __init__(self, manager: LoRAManager) -> None:
        self.manager = manager
        self.replicas: list[Replica] = []
        self.is_cut = False

    def __getattr__(self, method: str) -> Any:
        """Be the manager that replicas call."""

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_cut:
                raise Unavailable("no manager")
            return await getattr(self.manager, method)(*args, **kwargs)

        return call

    async def join(self, name: str, **loader: Any) -> Replica:
        fake, ended = FakeLoader(**loader), list[int]()
        adapter_cache = AdapterCache(fake, max_loaded=8)

        async def slots() -> Mapping[int, int]:
            return {}

        async def end(version: int) -> None:
            ended.append(version)

        sync = AdapterSync(adapter_cache, self, name, slots=slots, end=end)
        replica = Replica(name, fake, adapter_cache, sync, ended)
        await sync.begin()
        self.replicas.append(replica)
        return replica


async def make_manager(folder: Path, **lora: Any) -> LoRAManager:
    section = {"dynamic": True, "roots": [str(folder)], "load_timeout_s": 5.0, **lora}
    args = {"model": {"path": "base"}, "lora": section}
    manager = LoRAManager.__new__(LoRAManager)
    await LoRAManager.__init__(manager, args)  # as Serve does it
    return manager


@asynccontextmanager
async def cluster(folder: Path, *names: str, **lora: Any) -> AsyncIterator[Cluster]:
    made = Cluster(await make_manager(folder, **lora))
    for name in names:
        await made.join(name)
    try:
        yield made
    finally:
        for replica in made.replicas:
            replica.sync.close()
        made.manager._watching.cancel()
        await asyncio.sleep(0)


async def listed(made: Cluster) -> list[dict[str, Any]]:
    adapters: list[dict[str, Any]] = (await made.manager.adapters())["adapters"]
    return adapters


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def place(folder: Path, name: str) -> str:
    """Make what looks like an adapter from afar."""
    adapter = folder / name
    adapter.mkdir(parents=True, exist_ok=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    return str(adapter)


async def test_a_load_reaches_every_replica_also_one_that_comes_later(tmp_path: Path) -> None:
    async with cluster(tmp_path, "r1", "r2", "r3") as made:
        told = await made.manager.load("a", place(tmp_path, "a"))
        await made.join("later")

        assert {await replica.use("a") for replica in made.replicas} == {told["version"]}
        assert all(len(replica.loader.loaded) == 1 for replica in made.replicas)
        assert set(told["replicas"]) == {"r1", "r2", "r3"}
        assert {each["state"] for each in told["replicas"].values()} == {"loaded"}
        assert all(replica.adapter_cache.names == ["a"] for replica in made.replicas)


async def test_what_one_replica_cannot_load_none_serves(tmp_path: Path) -> None:
    old, new = place(tmp_path, "old"), place(tmp_path, "new")
    async with cluster(tmp_path, "r1", "r2") as made:
        made.replicas[1].loader.faults[new] = InvalidAdapter("wrong shapes")
        with pytest.raises(InvalidAdapter, match="wrong shapes"):
            await made.manager.load("a", new)
        await until(lambda: not any(replica.loader.loaded for replica in made.replicas))
        assert await listed(made) == []
        assert [replica.adapter_cache.names for replica in made.replicas] == [[], []]

        # A failed reload leaves the old version.
        made.replicas[1].loader.faults.clear()
        first = await made.manager.load("a", old)
        made.replicas[0].loader.faults[new] = InvalidAdapter("NaN")
        with pytest.raises(InvalidAdapter, match="NaN"):
            await made.manager.load("a", new, replaces=True)

        assert {await replica.use("a") for replica in made.replicas} == {first["version"]}
        made.replicas[0].loader.faults.clear()
        second = await made.manager.load("a", new, replaces=True)
        assert {await replica.use("a") for replica in made.replicas} == {second["version"]}


async def test_no_name_is_loaded_twice_by_mistake(tmp_path: Path) -> None:
    async with cluster(tmp_path, "r1") as made:
        source = place(tmp_path, "a")
        results = await asyncio.gather(
            *(made.manager.load("a", source) for _ in range(5)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, InvalidRequest)]
        assert len(refused) == 4
        assert "already" in str(refused[0])
        assert sum(made.replicas[0].loader.prepared.values()) == 1


async def test_changes_of_one_name_come_one_after_the_other(tmp_path: Path) -> None:
    """Each load is a version of its own, so two at a time would both have been staged."""
    async with cluster(tmp_path, "r1") as made:
        source = place(tmp_path, "a")
        most = 0

        async def load(delay_s: float) -> None:
            nonlocal most
            await asyncio.sleep(delay_s)
            loading = asyncio.create_task(made.manager.load("a", source, replaces=True))
            while not loading.done():
                most = max(most, len(made.manager._registry.desired().staged))
                await asyncio.sleep(0)
            await loading

        await asyncio.gather(*(load(number / 200) for number in range(12)))
        assert most == 1
        assert sum(made.replicas[0].loader.prepared.values()) == 12


async def test_what_changed_while_nobody_looked_gets_one_more_try(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    source = place(repo, "a")
    async with cluster(tmp_path, "r1", repo=str(repo), repo_period_s=0.05) as made:
        (replica,) = made.replicas
        before = replica.adapter_cache.lora_id("a")
        assert before is not None
        replica.loader.digests[source] = "other"
        while (entry := made.manager._registry.find("a")) is None or not entry.digest:
            await asyncio.sleep(0.01)
        for number in range(8):  # so that it leaves memory, and is read again
            await made.manager.load(f"b{number}", place(tmp_path, f"b{number}"))
        async with asyncio.timeout(10):
            while replica.adapter_cache.lora_id("a") in (before, None):
                version = replica.adapter_cache.lora_id("a")
                if version is not None:
                    with suppress(InvalidAdapter, UnknownModel):
                        await replica.use("a")
                await asyncio.sleep(0.02)
        assert await replica.use("a") != before


async def test_unloading_waits_for_requests(tmp_path: Path) -> None:
    async with cluster(tmp_path, "r1", "r2") as made:
        told = await made.manager.load("a", place(tmp_path, "a"))
        async with made.replicas[0].adapter_cache.use(told["version"]):
            unloading = asyncio.create_task(made.manager.unload("a"))
            await asyncio.sleep(0.2)
            assert not unloading.done()
            assert made.replicas[0].adapter_cache.names == []
            assert told["version"] in made.replicas[0].loader.loaded
        await unloading
        assert [replica.loader.loaded for replica in made.replicas] == [set(), set()]
        with pytest.raises(UnknownModel):
            await made.manager.unload("a")


@pytest.mark.observes("lora.load_timeout_s")
async def test_requests_are_waited_for_as_long_as_the_operator_says(tmp_path: Path) -> None:
    async with cluster(tmp_path, "r1", load_timeout_s=0.1) as made:
        told = await made.manager.load("a", place(tmp_path, "a"))
        async with made.replicas[0].adapter_cache.use(told["version"]):
            with pytest.raises(Unavailable, match=r"after 0\.1 s"):
                await made.manager.unload("a")


async def test_unloading_by_force_ends_requests(tmp_path: Path) -> None:
    async with cluster(tmp_path, "r1") as made:
        (replica,) = made.replicas
        told = await made.manager.load("a", place(tmp_path, "a"))
        async with replica.adapter_cache.use(told["version"]):
            unloading = asyncio.create_task(made.manager.unload("a", ends=True))
            await until(lambda: told["version"] in replica.ended)
        await unloading


async def test_a_manager_that_has_lost_everything_asks_the_replicas(tmp_path: Path) -> None:
    async with cluster(tmp_path, "r1", "r2") as made:
        told = await made.manager.load("a", place(tmp_path, "a"))
        made.is_cut = True
        made.manager._watching.cancel()
        assert await made.replicas[0].use("a") == told["version"]  # nobody misses it

        made.manager = await make_manager(tmp_path)
        made.is_cut = False
        assert [adapter["name"] for adapter in await listed(made)] == ["a"]  # at once
        async with asyncio.timeout(10):
            while len((await listed(made) or [{"replicas": ()}])[0]["replicas"]) < 2:
                await asyncio.sleep(0.05)
        assert {await replica.use("a") for replica in made.replicas} == {told["version"]}
        assert all(sum(r.loader.prepared.values()) == 1 for r in made.replicas)


@pytest.mark.observes("lora.store")
async def test_the_store_outlives_manager_and_replicas(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    async with cluster(tmp_path, "r1", store=store) as made:
        told = await made.manager.load("a", place(tmp_path, "a"), pinned=True)
    async with cluster(tmp_path, "r2", store=store) as made:
        assert await made.replicas[0].use("a") == told["version"]
        assert made.replicas[0].loader.pinned == {told["version"]}


async def test_a_replica_that_dies_amid_a_load_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SYNC_S", 0.1)
    monkeypatch.setattr(module, "GONE_S", 0.5)
    async with cluster(tmp_path, "r1", "r2") as made:
        dead = made.replicas[1]
        dead.loader.gate = asyncio.Event()
        loading = asyncio.create_task(made.manager.load("a", place(tmp_path, "a")))
        await asyncio.sleep(0.1)
        assert not loading.done()
        dead.sync.close()
        told = await loading
        assert await made.replicas[0].use("a") == told["version"]


async def test_an_adapter_that_no_replica_has_loaded_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SYNC_S", 0.1)
    monkeypatch.setattr(module, "GONE_S", 0.5)
    async with cluster(tmp_path, "r1") as made:
        made.replicas[0].loader.gate = asyncio.Event()
        loading = asyncio.create_task(made.manager.load("a", place(tmp_path, "a")))
        await asyncio.sleep(0.1)
        made.replicas[0].sync.close()

        with pytest.raises(Unavailable, match="No replica has loaded"):
            await loading
        assert await listed(made) == []


@pytest.mark.observes("lora.repo", "lora.repo_period_s")
async def test_the_repository_is_served_and_followed(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    place(repo, "a")
    async with cluster(tmp_path, "r1", repo=str(repo), repo_period_s=0.05) as made:
        (replica,) = made.replicas
        assert replica.adapter_cache.names == ["a"]
        place(repo, "b")
        await until(lambda: sorted(replica.adapter_cache.names) == ["a", "b"])
        before = replica.adapter_cache.lora_id("a")
        (repo / "a" / "adapter_model.safetensors").write_bytes(b"other")
        await until(lambda: replica.adapter_cache.lora_id("a") != before)
        shutil.rmtree(repo / "b")
        await until(lambda: replica.adapter_cache.names == ["a"])
        with pytest.raises(InvalidRequest, match="change it there"):
            await made.manager.unload("a")


async def test_what_cannot_be_looked_at_for_now_is_not_loaded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "repo"
    place(repo, "a")
    async with cluster(tmp_path, "r1", repo=str(repo), repo_period_s=3600.0) as made:
        before = made.replicas[0].adapter_cache.lora_id("a")
        monkeypatch.setattr(made.manager._sources, "stamp", lambda source: "")
        await made.manager._scan()
        await made.manager._renew()
        monkeypatch.undo()
        await made.manager._scan()
        await made.manager._renew()
        assert made.replicas[0].adapter_cache.lora_id("a") == before


async def test_what_is_broken_in_the_repository_is_not_served(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    source = place(repo, "bad")
    async with cluster(tmp_path, repo=str(repo), repo_period_s=0.05) as made:
        replica = await made.join("r1", faults={source: InvalidAdapter("truncated")})
        async with asyncio.timeout(5):
            while not any("refused" in entry for entry in await listed(made)):
                await asyncio.sleep(0.02)
        assert replica.adapter_cache.names == []
        (told,) = await listed(made)
        assert told == {"name": "bad", "owner": "repo", "refused": "truncated"}

        replica.loader.faults.clear()
        (repo / "bad" / "adapter_model.safetensors").write_bytes(b"whole")
        await until(lambda: replica.adapter_cache.names == ["bad"])


async def test_a_name_is_looked_for_when_it_is_asked_for(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    async with cluster(tmp_path, "r1", repo=str(repo), repo_period_s=3600.0) as made:
        assert not await made.manager.resolve("a")
        place(repo, "b")
        assert await made.manager.resolve("b")


@pytest.mark.observes("lora.roots")
async def test_only_roots_are_loaded_from(tmp_path: Path) -> None:
    async with cluster(tmp_path / "root", "r1") as made:
        with pytest.raises(InvalidRequest):
            await made.manager.load("a", place(tmp_path / "elsewhere", "a"))


async def test_adapters_of_the_configuration_stay(tmp_path: Path) -> None:
    named = [{"name": "a", "path": place(tmp_path, "a")}]
    async with cluster(tmp_path, "r1", adapters=named) as made:
        assert made.replicas[0].adapter_cache.names == ["a"]
        with pytest.raises(InvalidRequest, match=r"lora\.adapters"):
            await made.manager.unload("a")


@pytest.mark.parametrize("again", [False, True])
async def test_a_change_whose_caller_leaves_at_any_moment_is_whole_or_undone(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SOON_S", "GATHER_S"):
        monkeypatch.setattr(manager_sync, name, 0)
    source = place(tmp_path, "a")
    async with nothing_left(), cluster(tmp_path, "r1", "r2") as made:
        for moment in range(0, 60, 2):
            loading = made.manager.load("a", source, replaces=True)
            await cancelled(loading, moment, again=again)
            told = await made.manager.load("a", source, replaces=True)
            assert {await replica.use("a") for replica in made.replicas} == {told["version"]}
            assert not made.manager._registry.desired().staged
            await cancelled(made.manager.unload("a", ends=True), moment, again=again)
            with suppress(UnknownModel):
                await made.manager.unload("a", ends=True)
            async with asyncio.timeout(5):
                while any(replica.adapter_cache.reports() for replica in made.replicas):
                    await steps(1)
                while made.manager._registry.desired().ended:
                    await steps(1)
        assert [replica.loader.loaded for replica in made.replicas] == [set(), set()]
