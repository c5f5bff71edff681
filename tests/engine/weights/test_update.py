"""Other weights while the engine runs: every answer is of one set of them, from end to end."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.engine.client import LocalEngineClient
from remora.engine.launch import BuiltEngine, build_engine
from remora.engine.types import FinishReason, Request, SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.weights.test_damages import NORM, Damage, retensor

Answers = list[tuple[int, ...]]
LOADER = f"{__name__}:negated"
PROMPTS = [list(range(3 + number, 40 + 7 * number)) for number in range(4)]


def negated(source: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a folder, those of down_proj negated."""
    if source == "nowhere":
        raise OSError("there is nothing")
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        yield name, -tensor if "down_proj" in name else tensor


@pytest.fixture(scope="module")
def old(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    shutil.copytree(old, folder, dirs_exist_ok=True)
    save_file(dict(negated(str(old))), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def build(path: Path, new: Path, **engine: Any) -> BuiltEngine:
    model = {
        "path": str(path),
        "dtype": "float32",
        "weight_roots": [str(new.parent)],
        "weight_loaders": [LOADER],
    }
    keys = {"device": "cpu", "kv_tokens": 2048, "num_threads": 1, "max_running_requests": 3}
    return build_engine(parse_args({"model": model, "engine": keys | engine}), show_progress=False)


class Running:
    """An engine that runs, and what gives it other weights."""

    def __init__(self, built: BuiltEngine) -> None:
        assert built.new_weights is not None
        self.new_weights = built.new_weights
        self.client = LocalEngineClient(built.engine, None)
        self._number = 0

    async def answer(self, prompt: list[int], max_tokens: int = 12) -> tuple[int, ...]:
        self._number += 1
        request = Request(
            request_id=str(self._number),
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        ids: list[int] = []
        async for output in self.client.generate(request):
            ids += output.token_ids
            if output.finish_reason is FinishReason.ABORT:
                ids.append(-1)
        return tuple(ids)

    async def update(self, source: Path | str, load_format: str | None = None) -> None:
        install = await asyncio.to_thread(self.new_weights.prepare, str(source), load_format)
        await self.client.exchange(install)


@pytest.fixture(params=["auto", "torch"])
async def running(request: Any, old: Path, new: Path) -> AsyncIterator[Running]:
    running = Running(build(old, new, cpu_kernels=request.param))
    yield running
    running.client.close()


@pytest.fixture(scope="module")
def wanted(old: Path, new: Path) -> dict[str, Answers]:
    """What each set of weights answers to each prompt, in an engine that never had others."""

    async def answers(path: Path) -> Answers:
        running = Running(build(path, new))
        try:
            return [await running.answer(prompt) for prompt in PROMPTS]
        finally:
            running.client.close()

    return {"old": asyncio.run(answers(old)), "new": asyncio.run(answers(new))}


@pytest.mark.observes("model.weight_roots")
async def test_other_weights_answer_from_then_on_and_the_prefix_cache_forgets(
    running: Running, new: Path, wanted: dict[str, Answers]
) -> None:
    assert wanted["old"] != wanted["new"]
    assert [await running.answer(prompt) for prompt in PROMPTS] == wanted["old"]

    await running.update(new)

    assert [await running.answer(prompt) for prompt in PROMPTS] == wanted["new"]


@pytest.mark.observes("model.weight_loaders")
async def test_a_function_that_the_operator_names_may_give_them(
    running: Running, old: Path, wanted: dict[str, Answers]
) -> None:
    await running.update(old, LOADER)

    assert [await running.answer(prompt) for prompt in PROMPTS] == wanted["new"]


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
    assert [await running.answer(prompt) for prompt in PROMPTS] == wanted["old"]
    assert "old" in seen


async def test_requests_that_come_amid_an_exchange_wait_for_it(
    running: Running, new: Path, wanted: dict[str, Answers]
) -> None:
    long = asyncio.create_task(running.answer(PROMPTS[0], 200))
    while running.client.stats().num_running == 0:
        await asyncio.sleep(0.001)
    install = running.new_weights.prepare(str(new), None)
    exchanging = asyncio.create_task(running.client.exchange(install))
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
    running.new_weights._free_bytes = lambda: 1000

    with pytest.raises(ConfigError, match="restart the server with them"):
        await running.update(new)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"parallel": {"num_replicas": 2}}, "one replica"),
        ({"autoscaling": {"max_replicas": 2}}, "one replica"),
        ({"parallel": {"tp_size": 2}}, "tp_size and pp_size"),
        ({"lora": {"dynamic": True}}, "excludes adapters"),
        ({"engine": {"compile": True}}, "engine\\.compile"),
    ],
)
@pytest.mark.parametrize("key", ["weight_roots", "weight_loaders"])
def test_where_it_cannot_be_right_it_is_refused(key: str, sections: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}.*{reason}"):
        parse_args({"model": {"path": "x", key: ["a:b"]}, **sections})
