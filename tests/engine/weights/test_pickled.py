"""PyTorch files: read where asked for, tensors alone, and never for who did not ask."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from remora.configs.errors import ConfigError
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.facts import read_model_facts
from remora.engine.models.load import load_model
from remora.engine.weights.pickled import PickledWeights
from tests.conftest import TinyCheckpoints

SINGLE = "pytorch_model.bin"


def load(path: Path, load_format: str = "pt") -> DecoderModel:
    return load_model(
        path, dtype=torch.float32, load_format=load_format, device="cpu", show_progress=False
    )


@pytest.fixture
def tensors(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint whose config lies in the test's folder."""
    checkpoint = tiny_checkpoints("llama")
    shutil.copy(checkpoint / "config.json", tmp_path)
    loaded: dict[str, torch.Tensor] = load_file(checkpoint / "model.safetensors")
    return loaded


def assert_loaded(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    loaded = load(folder).tensors()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name].memory, expected[name]) for name in expected)


def test_one_file(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(tensors, tmp_path / SINGLE)

    assert_loaded(tmp_path, tensors)


def test_a_file_from_before_2020(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(tensors, tmp_path / SINGLE, _use_new_zipfile_serialization=False)

    assert_loaded(tmp_path, tensors)


def test_views_of_one_storage(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    down = "model.layers.0.mlp.down_proj.weight"
    torch.save(tensors | {down: tensors[down].T.contiguous().T}, tmp_path / SINGLE)

    assert_loaded(tmp_path, tensors)


def test_files_with_an_index(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    files = {name: f"pytorch_model-{number % 3}.bin" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        torch.save(part, tmp_path / file)
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / f"{SINGLE}.index.json").write_text(json.dumps(index))

    assert_loaded(tmp_path, tensors)


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_what_trainers_leave(
    wrapper: str, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save({wrapper: tensors, "epoch": 3}, tmp_path / "last.pt")
    torch.save({"state": {}}, tmp_path / "optimizer.pt")

    assert_loaded(tmp_path, tensors)


def test_without_mapping(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(tensors, tmp_path / SINGLE)
    source = PickledWeights(tmp_path, mmap=False)

    assert all(torch.equal(tensors[name], found) for name, found in source.read(tensors.keys()))


def test_safetensors_come_first_where_nothing_is_asked_for(
    tensors: dict[str, torch.Tensor], tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    shutil.copy(tiny_checkpoints("llama") / "model.safetensors", tmp_path)
    torch.save({"model.norm.weight": torch.zeros(1)}, tmp_path / SINGLE)

    assert load(tmp_path, "auto").tensors().keys() == tensors.keys()


def test_a_config_without_dtype_means_float32(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save(tensors, tmp_path / SINGLE)
    config = tmp_path / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({key: raw[key] for key in raw if "dtype" not in key}))

    facts = read_model_facts(tmp_path)

    assert facts.dtype == "float32"
    torch.save(tensors | {"more": torch.zeros(1)}, tmp_path / SINGLE)
    assert read_model_facts(tmp_path).fingerprint != facts.fingerprint


class Program:
    """A pickle that would make a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


def test_code_in_a_file_is_not_run(
    tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(tensors | {"x": Program()}, tmp_path / SINGLE)

    with pytest.raises(ConfigError, match=r"pytorch_model\.bin asks for \w+\.mkdir") as got:
        load(tmp_path)

    assert "weights_only" not in str(got.value)
    assert not (tmp_path / "made-by-a-pickle").exists()
