"""Other weights while the engine runs: every answer is of one set of them, from end to end."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from tests.conftest import TinyCheckpoints
from tests.engine.live.running import LOADER, PROMPTS, Answers, Running, build, write_negated
from tests.engine.weights.test_damages import NORM, Damage, retensor


@pytest.fixture(scope="module")
def old(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_negated(old, tmp_path_factory.mktemp("new"))


@pytest.fixture(params=["auto", "torch"])
async def running(request: Any, old: Path, new: Path, tmp_path: Path) -> AsyncIterator[Running]:
    built = build(old, roots=new.parent, engine={"cpu_kernels": request.param})
    running = Running(built, tmp_path, roots=new.parent)
    yield running
    running.close()


@pytest.fixture(scope="module")
def wanted(old: Path, new: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    """What each set of weights answers to each prompt, in an engine that never had others."""

    async def answers(path: Path) -> Answers:
        running = Running(build(path), tmp_path_factory.mktemp("updates"))
        try:
            return await running.answers()
        finally:
            running.close()

    return {"old": asyncio.run(answers(old)), "new": asyncio.run(answers(new))}


@pytest.mark.observes("model.weight_roots")
async def test_other_weights_answer_from_then_on_and_the_prefix_cache_forgets(
    running: Running, new: Path, wanted: dict[str, Answers]
) -> None:
    assert wanted["old"] != wanted["new"]
    assert await running.answers() == wanted["old"]

    await running.update(new)

    assert await running.answers() == wanted["new"]


@pytest.mark.observes("model.weight_loaders")
async def test_a_function_that_the_operator_names_may_give_them(
    running: Running, old: Path, wanted: dict[str, Answers]
) -> None:
    await running.update(old, LOADER)

    assert await running.answers() == wanted["new"]


async def test_no_answer_is_of_both(
    running: Running, old: Path, new: Path, wanted: dict[str, Answers]
) -> None:
    """More requests than rows come while weights change twice; each has seen one set of them."""
    seen = set()

    async def ask(number: int) -> None:
        await asyncio.sleep(0.002 * number)
        which = number % len(PROMPTS)
        answer = await running.answer(PROMPTS[which])
        kinds = {kind for kind in wanted if wanted[kind][which] == answer}
        assert kinds, f"prompt {which} was answered by neither: {answer}"
        seen.update(kinds)

    async def change() -> None:
        await running.update(new)
        await running.update(old, "safetensors")

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        changing = tasks.create_task(change())
        for number in range(60):
            tasks.create_task(ask(number))
        await changing
    assert await running.answers() == wanted["old"]
    assert "old" in seen


async def test_requests_that_come_amid_an_exchange_wait_for_it(
    running: Running, new: Path, wanted: dict[str, Answers]
) -> None:
    await running.live.prepare("new", running.allowed.source(str(new), None))
    long = asyncio.create_task(running.answer(PROMPTS[0], 400))
    while running.client.num_open == 0:
        await asyncio.sleep(0)
    exchanging = asyncio.create_task(running.live.install("new"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting = asyncio.create_task(running.answer(PROMPTS[1]))
    gone = asyncio.create_task(running.answer(PROMPTS[2]))
    while running.client.stats().num_waiting < 2:
        assert not exchanging.done()
        await asyncio.sleep(0.001)
    assert await running.client.is_waiting("3")
    assert await running.client.abort("3") == 1

    assert await gone == (-1,)
    assert (await long)[:12] == wanted["old"][0]
    assert await waiting == wanted["new"][1]
    await exchanging


def change_epsilon(file: Path) -> None:
    config = file.with_name("config.json")
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "rms_norm_eps": 0.1}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (retensor(**{NORM: None}), "missing: model.norm.weight"),
        (retensor(**{NORM: torch.ones(7)}), "of another shape"),
        (change_epsilon, "does not describe the served model"),
    ],
    ids=["missing", "shape", "config"],
)
async def test_weights_that_do_not_fit_leave_the_old_ones(
    running: Running, new: Path, wanted: dict[str, Answers], damage: Damage, reason: str
) -> None:
    folder = Path(shutil.copytree(new, new.parent / "damaged", dirs_exist_ok=True))
    damage(folder / "model.safetensors")

    with pytest.raises(ConfigError, match=reason):
        await running.update(folder)

    assert await running.answer(PROMPTS[0]) == wanted["old"][0]


@pytest.mark.parametrize(
    ("source", "load_format", "reason"),
    [
        ("/etc", None, "below none of model.weight_roots"),
        ("{root}/../elsewhere", None, "below none of model.weight_roots"),
        ("{root}/nothing", None, "nothing"),
        ("{root}/a\0b", None, "cannot be opened"),
        ("{root}/" + "x" * 300, None, "cannot be opened"),
        ("nowhere", LOADER, "failed: OSError: there is nothing"),
        ("nowhere", "os:listdir", "load_format is 'os:listdir'; this server allows"),
    ],
)
async def test_what_may_not_be_read_is_refused(
    running: Running, new: Path, source: str, load_format: str | None, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        await running.update(source.format(root=new.parent), load_format)


async def test_without_memory_for_two_copies_it_is_refused(running: Running, new: Path) -> None:
    running.rank._free_bytes = lambda: 1000

    with pytest.raises(ConfigError, match="restart the server with them"):
        await running.update(new)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"lora": {"dynamic": True}}, "excludes adapters"),
        ({"engine": {"compile": True}}, "engine\\.compile"),
    ],
)
@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "weight_roots", ["a"]),
        ("model", "weight_loaders", ["a:b"]),
        ("model", "weight_upload_limit", 1000),
        ("engine", "sleep_mode", True),
    ],
)
def test_where_it_cannot_be_right_it_is_refused(
    section: str, key: str, value: Any, sections: Any, reason: str
) -> None:
    given = {"model": {"path": "x"}, **{name: dict(keys) for name, keys in sections.items()}}
    given.setdefault(section, {})[key] = value
    with pytest.raises(ConfigError, match=f"{key}.*{reason}"):
        parse_args(given)
