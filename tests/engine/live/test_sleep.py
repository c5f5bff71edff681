"""Memory that is released and taken again: the same answers, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from remora.configs.errors import ConfigError, InvalidRequest, Unavailable
from remora.engine.live.rank import GRAPHS, KV_CACHE, TAGS, WEIGHTS, HoldsPages
from remora.engine.models.checkpoint import read_config
from remora.engine.models.decoder import DecoderModel
from remora.engine.weights.loader import whole_shapes
from tests.conftest import TinyCheckpoints
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
    long = asyncio.create_task(running.answer(PROMPTS[0], 100))
    while running.client.stats().num_running == 0:
        await asyncio.sleep(0.001)
    with pytest.raises(InvalidRequest, match="1 requests are running"):
        await running.live.sleep(ALL, "idle")
    assert not running.live.released

    await running.live.sleep(ALL, "abort")

    assert (await long)[-1] == -1
    await running.live.wake(ALL)
    waited = asyncio.create_task(running.answer(PROMPTS[0], 100))
    while running.client.stats().num_running == 0:
        await asyncio.sleep(0.001)
    await running.live.sleep(ALL, "wait")
    assert len(await waited) == 100


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


SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "head_dim": 64,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "bfloat16",
}
KV_TOKENS = 12_288


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 50 MB; its K and V take 8 kB a token."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(SIZES))
    generator = torch.Generator().manual_seed(1)
    model = DecoderModel(read_config(folder), dtype=torch.bfloat16, device="meta")
    tensors = {
        name: torch.randn(shape, generator=generator).mul(0.02).bfloat16()
        for name, shape in whole_shapes(model.tensors()).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.parametrize("kernels", KERNELS)
async def test_sleep_gives_back_weights_and_kv_and_cycles_leave_nothing(
    kernels: str, large: Path, tmp_path: Path
) -> None:
    await cycles(kernels, large, tmp_path, num_cycles=10)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", KERNELS)
async def test_a_hundred_cycles_leave_nothing(kernels: str, large: Path, tmp_path: Path) -> None:
    await cycles(kernels, large, tmp_path, num_cycles=100)


async def cycles(kernels: str, folder: Path, tmp_path: Path, *, num_cycles: int) -> None:
    """Sleep and wake; what sleep gives back is measured after all pages were written to."""
    engine = {"cpu_kernels": kernels, "kv_tokens": KV_TOKENS, "max_step_tokens": 64}
    model = {"dtype": "bfloat16", "skip_tokenizer": True}
    running = Running(build(folder, engine=engine, model=model), tmp_path / "updates")
    weight_bytes = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    try:
        wanted = await running.answer(PROMPTS[0], 4)
        asleep: list[int] = []
        shares: list[float] = []
        for _ in range(num_cycles):
            kv_bytes = write_pages(running)
            awake = anonymous_bytes()
            await running.live.sleep(ALL, "idle")
            asleep.append(anonymous_bytes())
            shares.append((awake - asleep[-1]) / (weight_bytes + kv_bytes))
            await running.live.wake(ALL)
            assert await running.answer(PROMPTS[0], 4) == wanted
        assert statistics.median(shares) >= 0.95, shares
        assert asleep[-1] - asleep[1] < 8e6, asleep
        kv_bytes = write_pages(running)
        awake = anonymous_bytes()
        await running.live.sleep(frozenset({KV_CACHE}), "idle")
        assert awake - anonymous_bytes() >= 0.95 * kv_bytes
    finally:
        running.close()


def write_pages(running: Running) -> int:
    """Write to all pages, which takes memory as requests do; return the bytes."""
    forward = running.rank._holder.forward_pass
    assert isinstance(forward, HoldsPages)
    memories = forward.page_memory()
    for memory in memories:
        memory.view(torch.uint8).fill_(1)
    return sum(memory.nbytes for memory in memories)
