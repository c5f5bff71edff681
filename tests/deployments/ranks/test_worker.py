"""A rank as an actor, without Ray: what it finds, what it raises, and when it ends."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError, EngineError
from remora.configs.load import parse_args
from remora.configs.planning.plan import EnginePlan, make_plan
from remora.configs.schema import ServeConfig
from remora.deployments.ranks import worker as worker_module
from remora.deployments.ranks.worker import EngineWorker
from remora.engine.launch import read_machine
from remora.engine.live.asleep import AsleepForward
from remora.engine.live.rank import WEIGHTS
from remora.engine.models.facts import read_model_facts
from remora.engine.parallel.follower import Follower
from remora.engine.parallel.layout import Layout
from remora.engine.parallel.rendezvous import Host
from tests.conftest import TinyCheckpoints


def make_config(path: Path, **engine: Any) -> ServeConfig:
    return parse_args(
        {
            "model": {"path": str(path), "dtype": "float32"},
            "engine": {"kv_tokens": 256, "num_threads": 1, **engine},
            "parallel": {"tp_size": 2},
        }
    )


def plan_of(config: ServeConfig, path: Path) -> EnginePlan:
    return make_plan(config, read_model_facts(path), read_machine(config), path)


async def test_a_model_that_is_not_there_is_missed_by_node(tmp_path: Path) -> None:
    worker = EngineWorker(make_config(tmp_path / "nothing"), 1)

    with pytest.raises(ConfigError, match=rf"^on node {os.uname().nodename}: .*nothing"):
        await worker.facts()


async def test_what_fails_in_loading_is_raised_where_it_is_waited_for(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("llama")
    config = make_config(path)
    worker = EngineWorker(config, 1)
    worker._path = tmp_path  # an empty folder

    with closing(Host(None, come_s=5, exchange_s=5)) as host, pytest.raises(ConfigError):
        await worker.load(plan_of(config, path), host.meeting)


async def test_a_rank_answers_while_it_follows_and_ends_after_rank_0(
    tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(worker_module, "ORPHAN_S", 0.0)
    monkeypatch.setattr("os._exit", codes.append)
    path = tiny_checkpoints("llama")
    config = make_config(path)
    worker = EngineWorker(config, 1)
    worker._path = path

    with closing(Host(None, come_s=30, exchange_s=30)) as host:
        loading = asyncio.create_task(worker.load(plan_of(config, path), host.meeting))
        followers, group = await asyncio.to_thread(host.gather, Layout(tp_size=2), "cpu")
    async with asyncio.timeout(20):
        await loading
    (following,) = (t for t in threading.enumerate() if t.name == "remora-rank1")
    async with asyncio.timeout(20):
        await worker.ping()
    await asyncio.to_thread(following.join, 0.3)
    assert following.is_alive()
    assert codes == []

    followers.close()
    group.close()

    await asyncio.to_thread(following.join, 20.0)
    assert codes == [1]


@pytest.mark.parametrize("sleep_mode", [False, True])
async def test_a_rank_that_leaves_joins_the_next_group(
    sleep_mode: bool, tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(worker_module, "ORPHAN_S", 0.0)
    monkeypatch.setattr("os._exit", codes.append)
    path = tiny_checkpoints("llama")
    config = make_config(path, sleep_mode=sleep_mode)
    worker = EngineWorker(config, 1)
    worker._path = path
    await worker.leave()  # nothing

    for _ in range(3):
        with closing(Host(None, come_s=30, exchange_s=30)) as host:
            loading = asyncio.create_task(worker.load(plan_of(config, path), host.meeting))
            followers, group = await asyncio.to_thread(host.gather, Layout(tp_size=2), "cpu")
        async with asyncio.timeout(20):
            await loading
            if sleep_mode:
                await worker.change_weights("release", frozenset({WEIGHTS}), False)
                assert isinstance(worker._follower, Follower)
                assert isinstance(worker._follower.forward_pass, AsleepForward)
            else:
                with pytest.raises(EngineError, match="cannot change"):
                    await worker.change_weights("discard", "new")
            await worker.leave()
        assert worker._follower is None
        assert not any(t.name == "remora-rank1" for t in threading.enumerate())
        followers.close()
        group.close()

    assert codes == []
