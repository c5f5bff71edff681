"""Checkpoints of one shape are told apart, and copies are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from remora.engine.models.facts import read_model_facts
from tests.conftest import TinyCheckpoints


@pytest.fixture
def copied(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> tuple[Path, Path]:
    path = tiny_checkpoints("llama")
    shutil.copytree(path, tmp_path / "copy")
    return path, tmp_path / "copy"


def test_a_copy_is_the_same_model(copied: tuple[Path, Path]) -> None:
    original, copy = copied
    config = copy / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()), indent=7))

    assert read_model_facts(copy) == read_model_facts(original)


def test_other_weights_of_the_same_shapes_are_another_model(copied: tuple[Path, Path]) -> None:
    original, copy = copied
    (file,) = copy.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)

    assert read_model_facts(copy) != read_model_facts(original)


def test_a_config_that_changes_no_shape_is_another_model(copied: tuple[Path, Path]) -> None:
    original, copy = copied
    config = copy / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 123.0}))

    assert read_model_facts(copy) != read_model_facts(original)


def test_a_folder_without_weights_has_a_fingerprint(copied: tuple[Path, Path]) -> None:
    _, copy = copied
    for file in copy.glob("*.safetensors"):
        file.unlink()

    assert read_model_facts(copy).fingerprint
