"""Replicas that change their weights together, with engines that only record calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remora.configs.errors import ConfigError, InvalidRequest, Unavailable
from remora.deployments.http.generation.weight_update import TAGS, Update
from remora.deployments.live_weights.fleet import Fleet
from remora.deployments.live_weights.replica import ReplicaWeights, WeightsState
from remora.engine.live.source import LiveSource
from tests.moments import cancelled, nothing_left, steps

ALL = frozenset(TAGS)
FIRST = LiveSource(path="/first")


class FakeLive:
    """LiveWeights that hold sources; `broken` ones do not load, and `busy` does not sleep."""

    def __init__(self) -> None:
        self.source: LiveSource | None = FIRST
        self.released: frozenset[str] = frozenset()
        self.staged: dict[str, LiveSource] = {}
        self.num_installed = 0
        self.num_dropped = 0
        self.is_busy = False
        self.breaks: Callable[[LiveSource], bool] = lambda source: source.path == "broken"
        self.uploads = SimpleNamespace(adopt=lambda source: source)

    async def prepare(self, name: str, source: LiveSource) -> None:
        await asyncio.sleep(0)
        if self.breaks(source):
            raise ConfigError("they do not fit")
        self.staged[name] = source

    async def install(self, name: str, *, aborts: bool = False) -> None:
        await asyncio.sleep(0)
        self.source = self.staged.pop(name)
        self.num_installed += 1

    async def discard(self, name: str) -> None:
        self.staged.pop(name, None)

    def drop_unused(self) -> None:
        self.num_dropped += 1

    async def sleep(self, tags: frozenset[str], mode: str, *, forgets: bool = False) -> None:
        if self.is_busy:
            raise InvalidRequest("1 requests are running", code="requests_running")
        self.released |= tags
        if forgets:
            self.source = None

    async def wake(self, tags: frozenset[str]) -> None:
        self.released -= tags

    def close(self) -> None:
        pass


class Replicas:
    """Peers of several replicas in this process; `lost` ones do not answer."""

    def __init__(self, num: int) -> None:
        self.lives = [FakeLive() for _ in range(num)]
        self.replicas = [self.make(str(number), live) for number, live in enumerate(self.lives)]
        self.fleets = [Fleet(replica, self) for replica in self.replicas]
        self.lost: set[int] = set()
        self.lose_after: str | None = None

    def make(self, name: str, live: FakeLive) -> ReplicaWeights:
        allowed = SimpleNamespace(source=lambda path, load_format: LiveSource(path=path))
        return ReplicaWeights(
            live,  # type: ignore[arg-type]
            allowed,  # type: ignore[arg-type]
            version="default",
            replica=name,
            can_sleep=True,
            model=Path("/model"),
        )

    async def all(self, operation: str, *args: Any) -> list[WeightsState | BaseException]:
        asked = [each for at, each in enumerate(self.replicas) if at not in self.lost]
        if operation == self.lose_after:
            self.lost.add(1)
        return await asyncio.gather(
            *(each.call(operation, *args) for each in asked), return_exceptions=True
        )

    @property
    def sources(self) -> set[str | None]:
        return {None if live.source is None else live.source.path for live in self.lives}


async def test_all_replicas_serve_the_same_weights_and_version() -> None:
    replicas = Replicas(3)

    await replicas.fleets[1].update(Update(path="/second", version="two"))

    assert replicas.sources == {"/second"}
    assert {(f.version, f.num_updates) for f in replicas.fleets} == {("two", 1)}
    await replicas.fleets[0].relabel("again")
    assert {f.version for f in replicas.fleets} == {"again"}


async def test_one_that_cannot_load_leaves_the_old_weights_to_all() -> None:
    replicas = Replicas(3)
    replicas.lives[2].breaks = lambda source: True

    with pytest.raises(InvalidRequest, match="they do not fit"):
        await replicas.fleets[0].update(Update(path="/second", version="two"))

    assert replicas.sources == {"/first"}
    assert {f.version for f in replicas.fleets} == {"default"}
    assert all(not live.staged for live in replicas.lives)
    replicas.lives[2].breaks = lambda source: False
    await replicas.fleets[0].update(Update(path="/third"))
    assert replicas.sources == {"/third"}


async def test_a_replica_that_is_lost_while_loading_leaves_the_old_weights() -> None:
    replicas = Replicas(2)
    replicas.lost = set()
    replicas.lose_after = "tell"

    with pytest.raises(Unavailable):
        await replicas.fleets[0].update(Update(path="/second"))

    assert replicas.sources == {"/first"}


async def test_of_two_updates_at_once_at_most_one_is_served_by_all() -> None:
    replicas = Replicas(3)

    found = await asyncio.gather(
        replicas.fleets[0].update(Update(path="/a")),
        replicas.fleets[2].update(Update(path="/b")),
        return_exceptions=True,
    )

    codes = [getattr(each, "code", "done") for each in found]
    assert "update_running" in codes
    assert len(replicas.sources) == 1
    assert all(not live.staged for live in replicas.lives)


async def test_replicas_sleep_together_or_not_at_all() -> None:
    replicas = Replicas(2)
    replicas.lives[1].is_busy = True
    with pytest.raises(InvalidRequest, match="running"):
        await replicas.fleets[0].sleep(ALL, "idle", forgets=False)
    assert [live.released for live in replicas.lives] == [frozenset(), frozenset()]

    replicas.lives[1].is_busy = False
    await replicas.fleets[0].sleep(ALL, "idle", forgets=False)
    assert [live.released for live in replicas.lives] == [ALL, ALL]
    await replicas.fleets[1].wake(ALL)
    assert [live.released for live in replicas.lives] == [frozenset(), frozenset()]


async def test_a_new_replica_becomes_like_the_others() -> None:
    replicas = Replicas(2)
    await replicas.fleets[0].update(Update(path="/second", version="two"))
    await replicas.fleets[0].sleep(frozenset({"kv_cache"}), "idle", forgets=False)
    live = FakeLive()
    replica = replicas.make("new", live)

    await Fleet(replica, replicas).catch_up()

    state = replica.state
    assert (state.version, state.num_updates, state.released) == ("two", 1, frozenset({"kv_cache"}))
    assert live.source == LiveSource(path="/second")


async def test_an_update_whose_caller_leaves_at_any_moment_is_whole_or_not_begun() -> None:
    async with nothing_left():
        for moment in range(8):
            replicas = Replicas(2)
            await cancelled(replicas.fleets[0].update(Update(path="/second")), moment)
            while replicas.fleets[0]._running:
                await steps(1)
            for replica in replicas.replicas:
                replica.close()
            assert len(replicas.sources) == 1
            assert all(not live.staged for live in replicas.lives)
