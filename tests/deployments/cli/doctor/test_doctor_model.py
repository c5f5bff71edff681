"""The findings of `remora doctor model` for checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from remora.configs.machine import read_machine_facts
from remora.deployments.cli.main import app
from tests.conftest import TinyCheckpoints
from tests.engine.attention.test_static_kv_scales import scale_file, with_scales
from tests.engine.fallback.checkpoints import make_checkpoint
from tests.engine.weights.gguf.tiny_gguf import make_gguf
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


def has_tiles() -> bool:
    return "amx_tile" in read_machine_facts().cpu_features


def test_a_known_family_runs_on_native_kernels(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("llama")
    result, shown = ask(path)

    assert result.exit_code == 0
    assert "LlamaForCausalLM" in shown
    assert "ok implementation remora:" in shown
    assert "native step program" in shown
    assert "768 B of KV cache per token" in shown
    assert f"chat template from chat_template.jinja in {path} ok" in shown
    assert "tool calls: none; reasoning: none" in shown


def test_the_cost_of_rounding_is_named(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("llama", dtype=torch.bfloat16)

    offered, chosen = ask(path)[1], ask(path, "--set", "model.quantization=int8")[1]

    assert "smaller model.quantization could round the weights: int8 " in offered
    bits, loss = ("8.25", "1.2") if has_tiles() else ("8.50", "0.6")
    assert f"({loss} % of perplexity), int4 " in offered
    assert f"{bits} bits a weight; a small model lost {loss} % of perplexity by it" in chosen
    assert "smaller" not in chosen


@pytest.mark.parametrize(("layers", "level"), [(12, "ok"), (3, "warn")])
def test_a_draft_model_is_named(tiny_checkpoints: TinyCheckpoints, layers: int, level: str) -> None:
    path = tiny_checkpoints("llama", num_hidden_layers=layers)
    draft = tiny_checkpoints("llama", num_hidden_layers=1)
    keys = ["speculation.method=draft", f"speculation.draft_model={draft}"]

    shown = ask(path, *(option for key in keys for option in ("--set", key)))[1]

    assert f"{level} drafts llama, " in shown
    assert ("will hardly pay" in shown) == (level == "warn")


def test_a_draft_model_is_compared_with_the_experts_that_a_token_uses(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    draft = tiny_checkpoints("llama", num_hidden_layers=1)
    keys = ["speculation.method=draft", f"speculation.draft_model={draft}"]
    options = [option for key in keys for option in ("--set", key)]

    for num_used, level in ((1, "warn"), (30, "ok")):
        path = tiny_checkpoints(
            "mixtral", num_hidden_layers=4, num_local_experts=30, num_experts_per_tok=num_used
        )
        shown = ask(path, *options)[1]
        assert f"{level} drafts llama, " in shown


def test_the_source_of_static_scales_is_named(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("llama")
    declares = with_scales(path, tmp_path / "scaled", "fp8_e4m3", 8.0)
    file = scale_file(path, tmp_path / "s.json", "int8", 8.0)
    int8 = ("--set", "engine.kv_dtype=int8")
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{}")

    assert "KV format fp8_e4m3, static scales of the checkpoint" in ask(declares)[1]
    assert "KV format int8, scales of tokens" in ask(declares, *int8)[1]
    named = ("--set", f"engine.kv_scales_file={file}")
    assert "KV format int8, static scales of s.json" in ask(path, *int8, *named)[1]
    named = ("--set", f"engine.kv_scales_file={damaged}")
    assert "damaged.json holds neither kv_cache" in ask(path, *int8, *named)[1]


@pytest.mark.parametrize("family", ["llama", "helium"])
def test_the_plan_is_shown_without_weights(
    family: str, helium: Path, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    sound = helium if family == "helium" else tiny_checkpoints(family)
    copy = shutil.copytree(sound, tmp_path / "copy")
    (copy / "model.safetensors").unlink()

    result, shown = ask(copy)

    assert result.exit_code == 2
    assert "million parameters in float32 expected" in shown
    assert f"{copy} holds no weights" in shown
    assert "of KV cache per token" in shown
    assert "ok context" in shown


def test_another_family_runs_by_transformers(helium: Path) -> None:
    result, shown = ask(helium)

    assert result.exit_code == 0
    assert "warn implementation transformers on remora's KV cache:" in shown

    result, shown = ask(helium, "--set", "model.impl=remora")
    assert result.exit_code == 2
    assert "fix not served The architecture HeliumForCausalLM in config.json" in shown


def test_a_gguf_file(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    file = make_gguf(tiny_checkpoints("llama"), tmp_path / "tiny.gguf")
    result, shown = ask(file)

    assert result.exit_code == 0
    assert "a GGUF file" in shown
    assert f"chat template from metadata of {file} ok" in shown


def test_the_source_of_the_chat_template_is_named(helium: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}")

    _, shown = ask(helium, "--set", f"model.chat_template={own}")

    assert f"chat template from {own}, as model.chat_template says" in shown


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 0), ("hidden_size", "x")])
@pytest.mark.parametrize("family", ["llama", "helium"])
def test_a_broken_value_is_refused_in_one_line(
    family: str,
    key: str,
    value: object,
    helium: Path,
    tiny_checkpoints: TinyCheckpoints,
    tmp_path: Path,
) -> None:
    sound = helium if family == "helium" else tiny_checkpoints(family)
    config = json.loads((sound / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))

    result, _ = ask(tmp_path)

    lines = result.output.splitlines()
    assert result.exit_code == 2
    assert [line.split()[0] for line in lines] == ["ok", "fix"]
    if family == "llama":
        assert f"{key} in config.json is" in lines[-1]


def test_embedding_models(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path, "bert")
    result, shown = ask(tmp_path)

    assert result.exit_code == 0
    for each in ("family BertModel", "task embed", "pooling mean", "output 48 dimensions"):
        assert each in shown

    planned = CliRunner().invoke(app, ["plan", str(tmp_path), "--set", "engine.device=cpu"])
    assert planned.exit_code == 0
    assert "output     48 dimensions" in planned.output
    (tmp_path / "model.safetensors").unlink()
    assert ask(tmp_path)[0].exit_code == 2
