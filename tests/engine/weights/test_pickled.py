"""PyTorch files: read where asked for, tensors alone, and never for who did not ask."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from remora.configs.errors import ConfigError
from remora.engine.weights.pickled import PickledWeights
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load

SINGLE = "pytorch_model.bin"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> Tensors:
    """Tensors of a checkpoint whose config lies in the test's folder."""
    checkpoint = tiny_checkpoints("llama")
    shutil.copy(checkpoint / "config.json", tmp_path)
    loaded: Tensors = load_file(checkpoint / "model.safetensors")
    return loaded


def write_old(tensors: Tensors, folder: Path) -> None:
    torch.save(tensors, folder / SINGLE, _use_new_zipfile_serialization=False)


def write_views(tensors: Tensors, folder: Path) -> None:
    """Write a tensor whose rows are not contiguous."""
    down = "model.layers.0.mlp.down_proj.weight"
    torch.save(tensors | {down: tensors[down].T.contiguous().T}, folder / SINGLE)


def write_index(tensors: Tensors, folder: Path) -> None:
    files = {name: f"pytorch_model-{number % 3}.bin" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        torch.save(part, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / f"{SINGLE}.index.json").write_text(json.dumps(index))


def write_wrapped(wrapper: str, tensors: Tensors, folder: Path) -> None:
    """Write a checkpoint as trainers do, with the state of the optimizer."""
    torch.save({wrapper: tensors, "epoch": 3}, folder / "last.pt")
    torch.save({"state": {}}, folder / "optimizer.pt")


@pytest.mark.parametrize(
    "write",
    [
        lambda tensors, folder: torch.save(tensors, folder / SINGLE),
        write_old,
        write_views,
        write_index,
        partial(write_wrapped, "state_dict"),
        partial(write_wrapped, "model"),
    ],
    ids=["one file", "before 2020", "views", "index", "state_dict", "model"],
)
def test_tensors_are_those_written(
    write: Callable[[Tensors, Path], None], tensors: Tensors, tmp_path: Path
) -> None:
    write(tensors, tmp_path)

    loaded = load(tmp_path, load_format="pt").tensors()

    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name].memory, tensors[name]) for name in tensors)


def test_without_mapping(tensors: Tensors, tmp_path: Path) -> None:
    torch.save(tensors, tmp_path / SINGLE)
    source = PickledWeights(tmp_path, mmap=False)

    assert all(torch.equal(tensors[name], found) for name, found in source.read(tensors.keys()))


def test_safetensors_come_first_where_nothing_is_asked_for(
    tensors: Tensors, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    shutil.copy(tiny_checkpoints("llama") / "model.safetensors", tmp_path)
    torch.save({"model.norm.weight": torch.zeros(1)}, tmp_path / SINGLE)

    assert load(tmp_path).tensors().keys() == tensors.keys()


class Program:
    """A pickle that would make a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


def test_code_in_a_file_is_not_run(
    tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(tensors | {"x": Program()}, tmp_path / SINGLE)

    with pytest.raises(ConfigError, match=r"pytorch_model\.bin asks for \w+\.mkdir") as got:
        load(tmp_path, load_format="pt")

    assert "weights_only" not in str(got.value)
    assert not (tmp_path / "made-by-a-pickle").exists()
