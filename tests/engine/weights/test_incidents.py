"""Model folders are strangers' data: nothing in them is run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from remora.configs.errors import ConfigError
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.weights.files import SAFETENSORS
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._canary),)


@pytest.fixture
def folder(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_checkpoints("llama"), copy)
    return copy


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "model.pth", "model.pkl", SAFETENSORS.single]
)
def test_a_pickle_in_place_of_weights_is_refused_unread(folder: Path, name: str) -> None:
    canary = folder.parent / "canary"
    (folder / SAFETENSORS.single).unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(canary)))

    with pytest.raises(ConfigError):
        load(folder)

    assert not canary.exists()
    pickle.loads((folder / name).read_bytes())  # the trap does work
    assert canary.exists()


def test_a_pickle_beside_weights_is_left_alone(folder: Path) -> None:
    canary = folder.parent / "canary"
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Trap(canary)))

    load(folder)
    Tokenizer.load(folder)

    assert not canary.exists()


@pytest.mark.parametrize("remote", ["trap.Trap", "somebody/elsewhere--trap.Trap"])
def test_code_of_a_model_folder_is_never_run(folder: Path, remote: str) -> None:
    canary = folder.parent / "canary"
    (folder / "trap.py").write_text(f"import os\nos.mkdir({str(canary)!r})\nclass Trap: ...\n")
    model_map = {"AutoConfig": remote, "AutoModelForCausalLM": remote}
    maps = {"config.json": model_map, "tokenizer_config.json": {"AutoTokenizer": [remote, remote]}}
    for name, auto_map in maps.items():
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"auto_map": auto_map}))

    for reading in (load, Tokenizer.load):
        try:
            reading(folder)
        except ConfigError:
            continue

    assert not canary.exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_an_index_leads_nowhere_else(folder: Path, name: str) -> None:
    (folder / SAFETENSORS.single).unlink()
    index = {"weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ConfigError, match="index"):
        load(folder)
