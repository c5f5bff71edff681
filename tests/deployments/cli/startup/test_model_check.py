"""What is found before Ray starts: models that cannot be served."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from remora.deployments.cli import serve as serve_module
from remora.deployments.cli.haproxy.choice import Proxy
from remora.deployments.cli.serve import _drive, serve_config
from remora.deployments.cli.startup.model_check import check_models, faults_of
from remora.deployments.cli.supervision.driver_link import DriverLink
from remora.deployments.cli.supervision.run_folder import RunFolder
from remora.deployments.cli.terminal import Failure
from tests.conftest import TinyCheckpoints


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def unknown_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without("config.json"), "config.json"),
        (written("config.json", "{"), "config.json"),
        (unknown_architecture, "NoSuchForCausalLM"),
        (without("model.safetensors"), "holds no weights"),
        (written("model.safetensors", "x"), "model.safetensors"),
        (without("tokenizer.json"), "tokenizer"),
        (written("tokenizer.json", "{"), "tokenizer"),
    ],
)
def test_a_damaged_model_is_refused_with_the_cause(
    damage: Callable[[Path], object],
    reason: str,
    tiny_checkpoints: TinyCheckpoints,
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(tiny_checkpoints("llama"), tmp_path / "model")
    damage(folder)

    faults = faults_of({"model": {"path": str(folder)}, "engine": {"device": "cpu"}})

    assert len(faults) == 1
    assert reason in faults[0]["text"]
    assert "Traceback" not in faults[0]["text"]


def test_each_of_several_models_is_checked_by_name(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    sound = {"model": {"path": str(tiny_checkpoints("llama")), "served_name": "sound"}}
    empty = {"model": {"path": str(tmp_path), "served_name": "empty"}}

    (fault,) = faults_of({"models": [sound, empty], "engine": {"device": "cpu"}})

    assert fault["text"].startswith("empty: ")


class FakeLink(DriverLink):
    """A link without a supervisor."""

    def __init__(self) -> None:
        """Install no signal handlers."""


def test_the_check_runs_in_a_process_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_checkpoints: TinyCheckpoints
) -> None:
    monkeypatch.setattr(serve_module, "_run_on_ray", lambda *_: pytest.fail("Ray was started"))
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which the driver changes
    model = tmp_path / "model"
    model.mkdir()

    with pytest.raises(Failure, match=r"config\.json"):
        _drive(
            serve_config([str(model)]),
            Proxy.PYTHON,
            RunFolder(tmp_path, -1),
            FakeLink(),
            is_verbose=False,
        )
    check_models({"model": {"path": str(tiny_checkpoints("llama"))}})  # raises nothing
