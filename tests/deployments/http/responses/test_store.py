"""Stores of responses: content, expiry and capacity."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError, InvalidRequest, Unavailable
from remora.deployments.http.responses.archive import (
    MAX_CHAIN,
    Archive,
    Record,
    UnknownResponse,
    new_response_id,
)
from remora.deployments.http.storage.store import FileStore, MemoryStore, ResponseStore, store_of
from tests.deployments.fakes import make_config, make_server_config


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


StoreMaker = Callable[..., ResponseStore]


@pytest.fixture(params=["memory", "file"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> StoreMaker:
    def make(clock: Clock, max_bytes: int = 1000) -> ResponseStore:
        if request.param == "memory":
            return MemoryStore(10.0, max_bytes=max_bytes, clock=clock)
        return FileStore(tmp_path / "r.db", 10.0, max_bytes=max_bytes, clock=clock)

    return make


async def test_what_is_put_is_there_until_it_is_deleted(make_store: StoreMaker) -> None:
    store = make_store(Clock())

    await store.put("a", b"one")
    await store.put("a", b"two")

    assert await store.get("a") == b"two"
    assert await store.get("b") is None
    assert [await store.delete("a"), await store.delete("a")] == [True, False]
    assert await store.get("a") is None


async def test_records_expire_after_their_last_use(make_store: StoreMaker) -> None:
    clock = Clock()
    store = make_store(clock)
    await store.put("used", b"x")
    await store.put("unused", b"x")

    clock.now += 9.9
    used = await store.get("used")
    clock.now += 9.9

    assert used == b"x"
    assert await store.get("used") == b"x"
    assert await store.get("unused") is None
    assert await store.delete("unused") is False


async def test_the_least_used_give_way_to_new_ones(make_store: StoreMaker) -> None:
    clock = Clock()
    store = make_store(clock, max_bytes=30)
    for name in ("a", "b", "c"):
        clock.now += 0.1
        await store.put(name, b"x" * 10)
    clock.now += 0.1
    await store.get("a")
    clock.now += 0.1

    full = [await store.get(name) for name in ("c", "a")]
    clock.now += 0.1
    await store.put("d", b"x" * 10)

    assert full == [b"x" * 10] * 2
    assert await store.get("b") is None
    assert [await store.get(name) for name in ("a", "c", "d")] == [b"x" * 10] * 3


async def test_a_record_larger_than_the_store_is_not_kept(make_store: StoreMaker) -> None:
    store = make_store(Clock(), max_bytes=30)

    await store.put("a", b"x" * 30)
    fits = await store.get("a")
    await store.put("b", b"x" * 31)

    assert fits is not None
    assert await store.get("b") is None


async def test_two_stores_share_a_file_that_is_their_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    one, other = FileStore(path, 10.0), FileStore(path, 10.0)

    await asyncio.gather(*(one.put(f"a{i}", b"x") for i in range(20)))
    await asyncio.gather(*(other.put(f"b{i}", b"x") for i in range(20)))

    assert await other.get("a19") == b"x"
    assert await one.get("b19") == b"x"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_configuration_names_a_store(tmp_path: Path) -> None:
    assert isinstance(store_of(make_config()), MemoryStore)
    assert store_of(make_config(response_store="none")) is None
    path = tmp_path / "r.db"
    assert isinstance(store_of(make_config(response_store=f"file:{path}")), FileStore)


@pytest.mark.observes("api.response_ttl_s")
async def test_the_configuration_says_how_long_responses_are_kept() -> None:
    store = store_of(make_config(response_ttl_s=0.05))
    assert store is not None

    await store.put("a", b"one")
    assert await store.get("a") == b"one"
    await asyncio.sleep(0.1)
    assert await store.get("a") is None


@pytest.mark.parametrize("name", ["redis", "file:", "file:r.db", "file:/nowhere/r.db", "file:{}"])
def test_a_store_that_cannot_be_is_a_fault_of_the_configuration(name: str, tmp_path: Path) -> None:
    no_database = tmp_path / "r.db"
    no_database.write_bytes(b"something else " * 100)
    with pytest.raises(ConfigError, match=r"api\.response_store"):
        store_of(make_config(response_store=name.format(no_database)))


def make_record(previous: str | None = None) -> Record:
    response: dict[str, Any] = {
        "id": new_response_id(),
        "previous_response_id": previous,
        "output": [],
    }
    return Record(response, [{"type": "message"}])


async def test_a_chain_begins_with_the_oldest_and_leaves_tools_out() -> None:
    """Hundreds of responses may each have megabytes of tools."""
    archive = Archive(MemoryStore(10.0))
    first = make_record()
    second = make_record(first.response["id"])
    await archive.keep(first)
    await archive.keep(Record(second.response | {"tools": [{"name": "add"}]}, second.items))

    assert await archive.chain(second.response["id"], "p") == [first, second]


async def test_a_chain_that_has_lost_a_link_is_unknown() -> None:
    archive = Archive(MemoryStore(10.0))
    record = make_record("resp_gone")
    await archive.keep(record)

    with pytest.raises(UnknownResponse, match="resp_gone") as caught:
        await archive.chain(record.response["id"], "previous_response_id")
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("num_more", [0, 1])
async def test_a_chain_has_a_limit(num_more: int) -> None:
    archive = Archive(MemoryStore(10.0))
    last: str | None = None
    for _ in range(MAX_CHAIN + num_more):
        record = make_record(last)
        await archive.keep(record)
        last = record.response["id"]

    with pytest.raises(InvalidRequest) if num_more else nullcontext():
        assert len(await archive.chain(str(last), "p")) == MAX_CHAIN


@pytest.mark.parametrize(
    ("name", "num_replicas", "keeps"),
    [("memory", 1, True), ("memory", 2, False), ("none", 1, False), ("file", 2, True)],
)
async def test_nothing_is_kept_where_another_replica_would_not_find_it(
    name: str, num_replicas: int, keeps: bool, tmp_path: Path
) -> None:
    store = f"file:{tmp_path / 'r.db'}" if name == "file" else name
    parallel = {"num_replicas": num_replicas}
    config = make_server_config(api={"response_store": store}, parallel=parallel)
    archive = Archive.configured(config)
    record = make_record()

    await archive.keep(record)

    assert archive.keeps is keeps
    if keeps:
        assert await archive.find(record.response["id"]) == record
    else:
        with pytest.raises(InvalidRequest, match=r"api\.response_store"):
            await archive.find(record.response["id"])


async def test_a_broken_store_costs_no_answer_and_is_said_to_be_broken(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "r.db", 10.0)
    with sqlite3.connect(tmp_path / "r.db") as database:
        database.execute("DROP TABLE responses")
    database.close()
    archive = Archive(store)
    record = make_record()

    await archive.keep(record)

    with pytest.raises(Unavailable):
        await archive.find(record.response["id"])
    with pytest.raises(Unavailable):
        await archive.forget(record.response["id"])


def test_ids_are_long_and_unique() -> None:
    ids = {new_response_id() for _ in range(100)}
    assert [len(id_) for id_ in ids] == [len("resp_") + 48] * 100
