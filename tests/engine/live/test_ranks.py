"""Weights of an engine of two ranks: both change at once, or neither."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError, EngineError
from remora.engine.launch import build_engine
from remora.engine.live.build import live_weights
from remora.engine.live.rank import TAGS
from remora.engine.live.source import LiveSource
from tests.conftest import TinyCheckpoints
from tests.engine.live.running import Answers, Running, build, config_of, write_negated
from tests.engine.parallel.teams import ThreadTeam

ALL = frozenset(TAGS)


class Threads:
    """OtherRanks over a team of threads."""

    def __init__(self, team: ThreadTeam, config: Any, plan: Any) -> None:
        self.follower = team.members[1]
        rank = live_weights(config, plan, self.follower.table, self.follower)
        assert rank is not None
        self.rank = rank

    async def call(self, operation: str, *args: Any) -> None:
        await asyncio.to_thread(getattr(self.rank, operation), *args)


@pytest.fixture(scope="module")
def folders(
    tiny_checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    old = tiny_checkpoints("llama")
    return old, write_negated(old, tmp_path_factory.mktemp("new"))


@pytest.fixture
async def two(folders: tuple[Path, Path], tmp_path: Path) -> AsyncIterator[Running]:
    config = config_of(folders[0], roots=folders[1].parent, parallel={"tp_size": 2})
    team = ThreadTeam()
    built = await asyncio.to_thread(build_engine, config, team=team, show_progress=False)
    others = Threads(team, config, built.plan)
    running = Running(built, tmp_path / "updates", roots=folders[1].parent, others=others)
    running.renewal = built.renewal  # type: ignore[attr-defined]
    running.others = others  # type: ignore[attr-defined]
    yield running
    await asyncio.to_thread(running.close)
    built.engine.close()
    team.join()
    assert team.errors == []


@pytest.fixture(scope="module")
def wanted(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Answers]:
    """What one rank answers with each set of weights."""

    async def answers(path: Path) -> Answers:
        built = build(path, engine={"cpu_kernels": "torch"})
        running = Running(built, tmp_path_factory.mktemp("updates"))
        try:
            return await running.answers()
        finally:
            running.close()

    return [asyncio.run(answers(folder)) for folder in folders]


async def test_ranks_are_updated_and_sleep_together(
    two: Running, folders: tuple[Path, Path], wanted: list[Answers]
) -> None:
    assert await two.answers() == wanted[0]
    await two.update(folders[1])
    assert await two.answers() == wanted[1]

    await two.live.sleep(ALL, "idle")
    assert two.others.rank.released == ALL  # type: ignore[attr-defined]
    await two.live.wake(ALL)

    assert await two.answers() == wanted[1]
    with pytest.raises(EngineError, match="would load the first ones"):
        two.renewal.run()  # type: ignore[attr-defined]


async def test_a_rank_that_cannot_load_leaves_the_old_weights_to_both(
    two: Running, folders: tuple[Path, Path], wanted: list[Answers], monkeypatch: Any
) -> None:
    def fail(name: str, source: LiveSource) -> None:
        raise ConfigError("rank 1: no such file")

    monkeypatch.setattr(two.others.rank, "prepare", fail)  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match="rank 1: no such file"):
        await two.update(folders[1])

    assert await two.answers() == wanted[0]
    assert two.rank._staged == {}
