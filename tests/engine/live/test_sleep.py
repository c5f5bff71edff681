"""Memory that is released and taken again: the same answers, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError, InvalidRequest, Unavailable
from remora.engine.live.rank import GRAPHS, KV_CACHE, TAGS, WEIGHTS
from tests.conftest import TinyCheckpoints
from tests.engine.live import cycles
from tests.engine.live.running import PROMPTS, Running, build, negated

ALL = frozenset(TAGS)
KERNELS = ["auto", "torch"]


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(params=KERNELS)
async def running(request: Any, folder: Path, tmp_path: Path) -> AsyncIterator[Running]:
    running = Running(build(folder, engine={"cpu_kernels": request.param}), tmp_path / "updates")
    yield running
    running.close()


@pytest.mark.observes("engine.sleep_mode")
@pytest.mark.parametrize(
    "tags", [[WEIGHTS], [KV_CACHE], TAGS, [GRAPHS]], ids=lambda tags: "+".join(tags)
)
async def test_an_engine_that_woke_answers_as_before(running: Running, tags: list[str]) -> None:
    before = await running.answers()

    await running.live.sleep(frozenset(tags), "idle")
    assert running.live.released == frozenset(tags)
    if tags != [GRAPHS]:
        with pytest.raises(Unavailable, match="/wake_up"):
            await running.answer(PROMPTS[0])
    await running.live.wake(ALL)

    assert not running.live.released
    assert await running.answers() == before
    running.engine.check_integrity()


async def test_memory_comes_back_part_by_part(running: Running) -> None:
    before = await running.answers()
    await running.live.sleep(frozenset({KV_CACHE}), "idle")
    await running.live.sleep(frozenset({WEIGHTS}), "idle")

    await running.live.wake(frozenset({WEIGHTS}))
    assert running.live.released == {KV_CACHE}
    with pytest.raises(Unavailable):
        await running.answer(PROMPTS[0])
    await running.live.wake(frozenset({KV_CACHE}))

    assert await running.answers() == before


async def test_an_idle_engine_is_demanded_or_made(running: Running) -> None:
    long = asyncio.create_task(running.answer(PROMPTS[0], 400))
    while running.client.num_open == 0:
        await asyncio.sleep(0)
    with pytest.raises(InvalidRequest, match="1 requests are running"):
        await running.live.sleep(ALL, "idle")
    assert not running.live.released

    await running.live.sleep(ALL, "abort")

    assert (await long)[-1] == -1
    await running.live.wake(ALL)
    waited = asyncio.create_task(running.answer(PROMPTS[0], 400))
    while running.client.num_open == 0:
        await asyncio.sleep(0)
    await running.live.sleep(ALL, "wait")
    assert len(await waited) == 400


async def test_discarded_weights_come_by_an_update(
    running: Running, folder: Path, tmp_path: Path
) -> None:
    await running.live.sleep(ALL, "idle", forgets=True)
    await running.live.wake(ALL)
    assert running.live.released == {WEIGHTS}
    with pytest.raises(Unavailable):
        await running.answer(PROMPTS[0])
    given = dict(negated(str(folder)))
    some = {name: given[name] for name in list(given)[:3]}
    with pytest.raises(ConfigError, match="missing"):
        await running.send(some, tmp_path)

    await running.send(given, tmp_path)

    assert not running.live.released
    after = await running.answers()
    await running.live.sleep(ALL, "idle")
    await running.live.wake(ALL)
    assert await running.answers() == after


async def test_weights_are_updated_while_they_are_released(
    running: Running, folder: Path, tmp_path: Path
) -> None:
    before = await running.answers()
    await running.live.sleep(ALL, "idle")

    await running.send(dict(negated(str(folder))), tmp_path)

    assert running.live.released == ALL - {WEIGHTS}
    await running.live.wake(ALL)
    assert await running.answers() != before


async def test_a_checkpoint_that_is_gone_leaves_it_asleep(
    running: Running, folder: Path, tmp_path: Path
) -> None:
    """The file comes back, and so does the engine."""
    before = await running.answers()
    await running.live.sleep(ALL, "idle")
    file = folder / "model.safetensors"
    file.rename(tmp_path / "away")
    try:
        with pytest.raises(ConfigError):
            await running.live.wake(ALL)
    finally:
        (tmp_path / "away").rename(file)
    assert running.live.released == ALL

    await running.live.wake(ALL)

    assert await running.answers() == before


@pytest.mark.parametrize("kernels", KERNELS)
def test_sleep_gives_back_weights_and_kv_and_cycles_leave_nothing(
    kernels: str, tmp_path: Path
) -> None:
    check_cycles(kernels, tmp_path, num_cycles=5)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_hundred_cycles_leave_nothing(kernels: str, tmp_path: Path) -> None:
    check_cycles(kernels, tmp_path, num_cycles=100)


def check_cycles(kernels: str, folder: Path, num_cycles: int) -> None:
    """Sleep and wake in a process of its own."""
    command = [sys.executable, "-m", cycles.__name__, kernels, str(folder), str(num_cycles)]
    # glibc keeps the end of each heap, and with a heap for each thread that is some 20 MB.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found = json.loads(ran.stdout)

    assert statistics.median(found["returned"]) >= 0.95 * found["used"], found
    assert found["asleep"][-1] - found["asleep"][1] < 8e6, found
    assert found["returned_kv"] >= 0.95 * found["kv"], found
