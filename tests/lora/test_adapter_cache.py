"""The adapters of one replica: loaded once, held while used, gone when nobody wants them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from contextlib import AsyncExitStack, nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.configs.errors import InvalidAdapter, NotFinite, Unavailable, UnknownModel
from remora.lora.adapter_cache import MAX_LOADS, MAX_SKIPPED, RETRY_S, AdapterCache
from remora.lora.records import AdapterRecord
from tests.lora.fake_loader import FakeLoader, record, wanted
from tests.moments import end, nothing_left, steps


def make_cache(
    loader: FakeLoader, *records: AdapterRecord, staged: tuple[int, ...] = (), **options: Any
) -> AdapterCache:
    """Return a cache that serves these records."""
    adapter_cache = AdapterCache(loader, **({"max_loaded": 4} | options))
    adapter_cache.adopt(wanted(*records, staged=staged))
    return adapter_cache


async def use(adapter_cache: AdapterCache, version: int, num_steps: int = 0) -> int:
    async with adapter_cache.use(version) as held:
        await steps(num_steps)
        return held


async def test_many_requests_make_one_load() -> None:
    loader = FakeLoader(gate=asyncio.Event())
    adapter_cache = make_cache(loader, record(1), max_loaded=1)
    tasks = [asyncio.create_task(use(adapter_cache, 1)) for _ in range(20)]
    await steps(50)
    assert loader.gate is not None
    loader.gate.set()

    assert await asyncio.gather(*tasks) == [1] * 20
    assert loader.prepared == {1: 1}


async def test_loads_run_side_by_side_up_to_a_bound() -> None:
    loader = FakeLoader(gate=asyncio.Event())
    adapter_cache = make_cache(loader, *map(record, range(1, 11)), max_loaded=20)
    await steps(50)
    assert loader.num_loading == MAX_LOADS
    assert loader.gate is not None
    loader.gate.set()
    await adapter_cache.settled()

    assert loader.loaded == set(range(1, 11))
    assert loader.most_loading == MAX_LOADS


@pytest.mark.parametrize(("by_use", "left"), [(True, {1, 3}), (False, {2, 3})])
async def test_what_leaves_first(by_use: bool, left: set[int]) -> None:
    loader = FakeLoader()
    adapter_cache = make_cache(loader, *map(record, (1, 2, 3)), max_loaded=2, by_use=by_use)
    await adapter_cache.settled()
    for version in (1, 2, 1, 3):
        await use(adapter_cache, version)
    await adapter_cache.settled()

    assert loader.loaded == left


async def test_what_is_used_never_leaves_and_the_next_waits_for_it() -> None:
    loader = FakeLoader()
    adapter_cache = make_cache(loader, record(1), record(2), max_loaded=1)
    async with adapter_cache.use(1):
        waiting = asyncio.create_task(use(adapter_cache, 2))
        await steps(50)
        assert loader.loaded == {1}
        assert {r.lora_id: r.state for r in adapter_cache.reports()} == {1: "loaded", 2: "waiting"}
    assert await waiting == 2
    await adapter_cache.settled()
    assert loader.loaded == {2}


async def test_one_that_waits_for_room_is_not_overtaken_for_ever() -> None:
    loader = FakeLoader()
    adapter_cache = make_cache(loader, record(1), record(2), max_loaded=1)
    await adapter_cache.settled()
    rare: asyncio.Task[int] | None = None
    num_before = 0

    async def busy() -> None:
        """Keep the only place in use at any moment."""
        nonlocal rare, num_before
        async with AsyncExitStack() as held:
            await held.enter_async_context(adapter_cache.use(1))
            rare = asyncio.create_task(use(adapter_cache, 2))
            await steps(50)
            while True:
                entering = asyncio.create_task(held.enter_async_context(adapter_cache.use(1)))
                done, _ = await asyncio.wait({entering}, timeout=0.05)
                if not done:
                    entering.cancel()
                    return
                num_before += 1

    await busy()
    assert rare is not None
    assert await rare == 2
    assert num_before == MAX_SKIPPED


async def test_a_new_version_leaves_running_requests_what_they_have() -> None:
    loader = FakeLoader()
    adapter_cache = make_cache(loader, record(1, "a"))
    async with adapter_cache.use(1) as old:
        adapter_cache.adopt(wanted(record(2, "a"), revision=2))
        assert adapter_cache.lora_id("a") == 2
        assert await use(adapter_cache, 1) == 2  # it came for "a", and began after the change
        assert old == 1
        assert 1 in loader.loaded
    await steps(50)
    assert loader.loaded == {2}
    assert [report.lora_id for report in adapter_cache.reports()] == [2]


async def test_what_is_staged_is_loaded_and_not_served() -> None:
    loader = FakeLoader()
    adapter_cache = make_cache(loader, record(1), staged=(2,))
    await adapter_cache.settled()

    assert loader.loaded == {1, 2}
    assert adapter_cache.names == ["a1"]
    assert adapter_cache.lora_id("a2") is None

    adapter_cache.adopt(wanted(record(1), revision=2))
    await steps(50)
    assert loader.loaded == {1}


async def test_what_was_unloaded_is_unknown() -> None:
    adapter_cache = make_cache(FakeLoader(), record(1))
    await adapter_cache.settled()
    adapter_cache.adopt(wanted(revision=2))
    await steps(50)

    with pytest.raises(UnknownModel, match="'a1' was unloaded"):
        await use(adapter_cache, 1)
    assert adapter_cache.reports() == ()


async def test_a_fault_is_told_to_everybody_and_tried_again_later() -> None:
    now = 100.0
    loader = FakeLoader(faults={"/a1/1": InvalidAdapter("no such tensor")})
    adapter_cache = make_cache(loader, record(1), record(2), clock=lambda: now)
    tasks = [asyncio.create_task(use(adapter_cache, 1)) for _ in range(3)]
    for task in tasks:
        with pytest.raises(InvalidAdapter, match="no such tensor"):
            await task
    assert adapter_cache.names == ["a2"]
    assert loader.prepared[1] == 1

    loader.faults.clear()
    now += RETRY_S
    assert await use(adapter_cache, 1) == 1
    assert adapter_cache.names == ["a1", "a2"]


async def test_an_error_of_the_disk_is_no_fault_of_the_adapter() -> None:
    loader = FakeLoader(faults={"/a1/1": OSError("the disk is away")})
    adapter_cache = make_cache(loader, record(1))

    with pytest.raises(Unavailable, match="the disk is away"):
        await use(adapter_cache, 1)
    assert adapter_cache.names == ["a1"]


async def test_files_that_have_changed_are_not_taken_for_the_same_version() -> None:
    loader = FakeLoader(digests={"/a1/1": "new"})
    adapter_cache = make_cache(loader, record(1)._replace(digest="old"))

    with pytest.raises(InvalidAdapter, match="have changed"):
        await use(adapter_cache, 1)
    assert loader.loaded == set()


async def test_pinned_adapters_stay() -> None:
    loader = FakeLoader()
    adapter_cache = make_cache(loader, record(1), record(2), record(3, pinned=True), max_loaded=2)
    await adapter_cache.settled()
    assert loader.pinned == {3}
    for version in (1, 2, 1, 2):
        await use(adapter_cache, version)
        await adapter_cache.settled()
        assert 3 in loader.loaded
    adapter_cache.adopt(wanted(record(1), record(2), record(3), revision=2))
    assert loader.pinned == set()
    await use(adapter_cache, 1)
    await use(adapter_cache, 2)
    await adapter_cache.settled()
    assert loader.loaded == {1, 2}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), max_loaded=st.integers(1, 4))
def test_nothing_is_mixed_up_or_left_behind(seed: int, max_loaded: int) -> None:
    """Requests, reloads, unloads, pins and failures at random.

    FakeLoader sees to it that loads and leavings of a version alternate.
    """
    asyncio.run(_storm(random.Random(seed), max_loaded))


async def _storm(chance: random.Random, max_loaded: int) -> None:
    loader = FakeLoader()
    adapter_cache = AdapterCache(loader, max_loaded=max_loaded, by_use=chance.random() < 0.5)
    active = {f"n{number}": number for number in range(1, 9)}
    pinned: set[str] = set()
    versions = 9
    using: Counter[int] = Counter()
    answers = Counter[str]()

    async def request(name: str, version: int) -> None:
        try:
            async with adapter_cache.use(version) as held:
                using[held] += 1
                for _ in range(chance.randrange(6)):
                    assert held in loader.loaded, "put out while it was used"
                    await asyncio.sleep(0)
                using[held] -= 1
                answers["served"] += 1
        except UnknownModel:
            answers["unknown"] += 1

    def adopt() -> None:
        records = [record(v, n, pinned=n in pinned) for n, v in active.items()]
        adapter_cache.adopt(wanted(*records, revision=versions))

    adopt()
    tasks: list[asyncio.Task[None]] = []
    for _ in range(150):
        what = chance.random()
        name = f"n{chance.randrange(1, 9)}"
        if what < 0.75 and (version := adapter_cache.lora_id(name)) is not None:
            task = asyncio.create_task(request(name, version))
            tasks.append(task)
            if chance.random() < 0.1:
                await asyncio.sleep(0)
                task.cancel()
        elif what < 0.85:
            active[name] = versions = versions + 1
            adopt()
        elif what < 0.9:
            active.pop(name, None)
            pinned.discard(name)
            adopt()
        elif what < 0.95 and name in active:
            pinned = {name} if max_loaded > 1 and name not in pinned else set()
            adopt()
        await asyncio.sleep(0)
        loaded = [r for r in adapter_cache.reports() if r.state == "loaded"]
        assert len(loaded) <= max_loaded + MAX_LOADS
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks, return_exceptions=True)
    failed = [t for t in tasks if not t.cancelled() and t.exception() is not None]
    assert not failed, failed[0].exception()
    await adapter_cache.settled()
    await steps(50)
    assert loader.loaded <= set(active.values())
    assert len(loader.loaded) <= max_loaded
    adapter_cache.adopt(wanted(revision=10**6))
    await adapter_cache.settled()
    await steps(50)
    assert loader.loaded == set()
    assert adapter_cache.reports() == ()
    assert answers["served"]


async def answer(adapter_cache: AdapterCache, version: int, *, is_finite: bool) -> None:
    async with adapter_cache.use(version):
        if not is_finite:
            raise NotFinite("logits")


async def test_an_adapter_whose_answers_are_not_finite_is_used_no_longer() -> None:
    adapter_cache = make_cache(FakeLoader(), record(1), record(2), max_loaded=2)
    for is_finite in (False, False, True, False, False):
        with nullcontext() if is_finite else pytest.raises(NotFinite):
            await answer(adapter_cache, 1, is_finite=is_finite)
    assert "a1" in adapter_cache.names

    with pytest.raises(NotFinite):
        await answer(adapter_cache, 1, is_finite=False)

    with pytest.raises(InvalidAdapter):
        await answer(adapter_cache, 1, is_finite=True)
    assert adapter_cache.names == ["a2"]
    assert {r.lora_id: r.state for r in adapter_cache.reports()} == {1: "failed", 2: "loaded"}
    assert adapter_cache.stats["not_finite_total"] == 5
    adapter_cache.adopt(wanted(record(3, "a1"), record(2), revision=2))
    await answer(adapter_cache, 3, is_finite=True)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("unloads", [False, True])
@pytest.mark.parametrize("busy_steps", [0, 3, 8])
async def test_a_use_that_is_cancelled_at_any_moment_holds_nothing(
    busy_steps: int, unloads: bool, again: bool
) -> None:
    async with nothing_left():
        for moment in range(25):
            loader = FakeLoader()
            adapter_cache = make_cache(loader, record(1), record(2), max_loaded=1)
            await adapter_cache.settled()
            other = asyncio.create_task(use(adapter_cache, 1, busy_steps))
            await steps(1)
            using = asyncio.create_task(use(adapter_cache, 2, 4))
            await steps(moment)
            if unloads:
                adapter_cache.adopt(wanted(record(1), revision=2))
            using.cancel()
            await end(using, again=again)
            await other
            await adapter_cache.settled()

            assert (adapter_cache.stats["used"], adapter_cache.stats["waiting"]) == (0, 0)
            assert {each.lora_id for each in adapter_cache.reports()} == (
                {1} if unloads else {1, 2}
            )
            assert await use(adapter_cache, 1) == 1
            adapter_cache.adopt(wanted(revision=3))
            await adapter_cache.settled()
            assert loader.loaded == set()


async def test_a_version_may_come_back_at_any_moment_of_its_leaving() -> None:
    async with nothing_left():
        for between, moment in itertools.product(range(4), range(12)):
            loader = FakeLoader()
            adapter_cache = make_cache(loader, record(1), max_loaded=1)
            await adapter_cache.settled()
            adapter_cache.adopt(wanted(revision=2))
            await steps(between)
            adapter_cache.adopt(wanted(revision=3))
            await steps(moment)
            adapter_cache.adopt(wanted(record(1), revision=4))
            await adapter_cache.settled()

            assert [each.lora_id for each in adapter_cache.reports()] == [1]
            assert await use(adapter_cache, 1) == 1
            adapter_cache.adopt(wanted(revision=5))
            await adapter_cache.settled()
            assert loader.loaded == set()
