"""Tensors that replace some of the served weights, and weights that are saved."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from remora.configs.errors import ConfigError
from remora.engine.live.rank import TAGS
from remora.engine.live.uploads import Uploads
from tests.conftest import TinyCheckpoints
from tests.engine.live.running import LOADER, PROMPTS, Running, build, negated

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(params=["auto", "torch"])
async def running(request: Any, folder: Path, tmp_path: Path) -> AsyncIterator[Running]:
    roots = tmp_path / "roots"
    built = build(folder, roots=roots, engine={"cpu_kernels": request.param})
    running = Running(built, tmp_path / "updates", roots=roots)
    yield running
    running.close()


def changed(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that the other set of weights has changed."""
    return {name: tensor for name, tensor in negated(str(folder)) if "down_proj" in name}


def found(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


@pytest.mark.observes("model.weight_upload_limit")
async def test_some_tensors_make_the_whole_other_set(
    running: Running, folder: Path, tmp_path: Path
) -> None:
    """Given all at once, one after the other, or by the loader: the same answers."""
    before = await running.answers()
    given = changed(folder)

    await running.send(given, tmp_path)

    wanted = await running.answers()
    assert wanted != before
    await running.update(folder, LOADER)
    assert await running.answers() == wanted
    await running.send({name: -tensor for name, tensor in given.items()}, tmp_path)
    assert await running.answers() == before
    for name, tensor in given.items():
        await running.send({name: tensor}, tmp_path)
    assert await running.answers() == wanted


async def test_sleep_keeps_tensors_and_files_that_are_replaced_go(
    running: Running, folder: Path, tmp_path: Path
) -> None:
    given = changed(folder)
    for _ in range(3):
        await running.send(given, tmp_path)
        assert len(found(tmp_path, "updates/*/*")) == 1
    wanted = await running.answers()

    await running.live.sleep(frozenset(TAGS), "idle")
    await running.live.wake(frozenset(TAGS))

    assert await running.answers() == wanted
    running.live.close()
    assert found(tmp_path, "updates/*") == []


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"model.nothing.weight": torch.ones(3)}, "no tensors of these names: model.nothing"),
        ({NORM: torch.ones(3)}, "expected \\["),
    ],
)
async def test_tensors_that_do_not_fit_leave_the_old_ones(
    running: Running, tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str
) -> None:
    before = await running.answer(PROMPTS[0])

    with pytest.raises(ConfigError, match=reason):
        await running.send(tensors, tmp_path)

    assert await running.answer(PROMPTS[0]) == before


async def test_saved_weights_are_a_checkpoint_with_the_same_answers(
    running: Running, folder: Path, tmp_path: Path
) -> None:
    await running.send(changed(folder), tmp_path)
    wanted = await running.answers()
    out = running.allowed.target(str(tmp_path / "roots" / "saved"))

    num_bytes = await running.live.save(out, folder)

    saved = load_file(out / "model.safetensors")
    assert num_bytes == sum(tensor.nbytes for tensor in saved.values())
    expected = dict(negated(str(folder)))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    await running.update(folder, LOADER)
    await running.update(out)
    assert await running.answers() == wanted
    with pytest.raises(ConfigError, match="exists"):
        await running.live.save(out, folder)
    assert [each.name for each in out.parent.iterdir()] == ["saved"]
    with pytest.raises(ConfigError, match="below none"):
        running.allowed.target(str(tmp_path / "elsewhere"))


def test_parts_are_refused_out_of_order_above_the_limit_and_unless_they_are_a_file(
    tmp_path: Path,
) -> None:
    uploads = Uploads(tmp_path, 10)
    uploads.add("a", 0, b"12345")
    with pytest.raises(ConfigError, match="5 bytes have arrived"):
        uploads.add("a", 3, b"45")
    with pytest.raises(ConfigError, match="weight_upload_limit"):
        uploads.add("a", 5, b"678901")
    uploads.add("a", 0, b"12345")
    with pytest.raises(ConfigError, match="safetensors"):
        uploads.finish("a")
    with pytest.raises(ConfigError, match="no bytes"):
        uploads.finish("a")
    for number in range(8):
        uploads.add(f"b{number}", 0, b"1")
    with pytest.raises(ConfigError, match="8 uploads are open"):
        uploads.add("one more", 0, b"1")
    with pytest.raises(ConfigError, match="not set"):
        Uploads(tmp_path, None).add("a", 0, b"1")
    (tmp_path / f"{2**22 + 1}-left").mkdir()  # by a process that is gone
    Uploads(tmp_path, 10)
    assert not (tmp_path / f"{2**22 + 1}-left").exists()
    uploads.close()
    assert list(tmp_path.iterdir()) == []
