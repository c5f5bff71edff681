"""What `remora doctor model` says of checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from remora.deployments.cli.main import app
from tests.conftest import TinyCheckpoints
from tests.engine.fallback.checkpoints import make_checkpoint
from tests.engine.weights.tiny_gguf import make_gguf
from tests.tiny_encoders import make_tiny_encoder


@pytest.fixture(scope="module")
def helium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("doctor") / "helium", "helium")


def ask(path: Path, *options: str) -> tuple[Result, str]:
    result = CliRunner().invoke(
        app,
        ["doctor", "model", str(path), "--set", "engine.device=cpu", *options],
        env={"COLUMNS": "400"},
    )
    return result, " ".join(result.output.split())


def test_a_family_of_ours_runs_on_our_kernels(tiny_checkpoints: TinyCheckpoints) -> None:
    result, said = ask(tiny_checkpoints("llama"))

    assert result.exit_code == 0
    assert "LlamaForCausalLM" in said
    assert "remora's own code" in said
    assert "native step program" in said
    assert "768 B of KV cache per token" in said
    assert "chat template from the checkpoint" in said
    assert "tool calls: none; reasoning: none" in said


def test_another_family_is_left_to_transformers_which_is_said(helium: Path) -> None:
    result, said = ask(helium)

    assert result.exit_code == 0
    assert "warn implementation transformers' code on our KV cache: not a family of ours" in said

    result, said = ask(helium, "--set", "model.impl=remora")
    assert result.exit_code == 2
    assert "fix not served config.json names the architecture HeliumForCausalLM" in said


def test_a_gguf_file_is_looked_at_alike(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    result, said = ask(make_gguf(tiny_checkpoints("llama"), tmp_path / "tiny.gguf"))

    assert result.exit_code == 0
    assert "a GGUF file" in said


def test_missing_weights_are_the_last_word(helium: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(helium, copy)
    (copy / "model.safetensors").unlink()

    result, said = ask(copy)

    assert result.exit_code == 2
    assert "holds no weights" in said
    assert "context" not in said


def test_models_that_make_no_text_are_looked_at_alike(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path, "bert")
    result, said = ask(tmp_path)

    assert result.exit_code == 0
    for each in ("family BertModel", "task embed", "pooling mean", "gives 48 dimensions"):
        assert each in said

    planned = CliRunner().invoke(app, ["plan", str(tmp_path), "--set", "engine.device=cpu"])
    assert planned.exit_code == 0
    assert "gives      48 dimensions" in planned.output
    (tmp_path / "model.safetensors").unlink()
    assert ask(tmp_path)[0].exit_code == 2
