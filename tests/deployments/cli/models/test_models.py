"""`remora pull`, `models` and `rm` with a hub of our own and a tiny checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remora.deployments.cli.main import app
from remora.engine.weights import resolve_model as resolver
from tests.engine.sources.hub_server import Hub, serving_hub
from tests.tiny_models import make_tiny_checkpoint

REPO = "me/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(resolver, "_resolved", {})
    with serving_hub(REPO, tmp_path / "hub", monkeypatch) as hub:
        hub.put(make_tiny_checkpoint(tmp_path / "checkpoint", "llama"))
        yield hub


def run(*arguments: str) -> tuple[int, str, str]:
    resolver._resolved.clear()
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def test_a_model_is_pulled_listed_and_removed(hub: Hub) -> None:
    code, text, _ = run("pull", REPO)
    assert code == 0
    assert text.startswith(f"{REPO}: ")
    assert f"snapshots/{hub.commit}" in text

    code, text, _ = run("models")
    (row,) = [line for line in text.splitlines() if line.startswith(REPO)]
    assert code == 0
    assert row.endswith("remora, LlamaForCausalLM")

    assert run("rm", REPO)[0] == 0
    assert run("models")[1].startswith("no models in ")
    code, _, error = run("rm", REPO)
    assert code == 2
    assert "not in the caches" in error


@pytest.mark.parametrize("architecture", ["NoSuchForCausalLM", "NoSuchModel"])
def test_an_architecture_that_is_not_served_is_refused_before_its_weights(
    architecture: str, hub: Hub
) -> None:
    config = json.loads(hub.files["config.json"])
    config |= {"architectures": [architecture], "model_type": "no-such-model"}
    hub.files["config.json"] = json.dumps(config).encode()

    code, _, error = run("pull", REPO)

    assert code == 2
    assert architecture in error
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]
    assert "incomplete" in run("models")[1]


def test_doctor_examines_a_model_whose_weights_are_not_here(hub: Hub) -> None:
    code, text, _ = run("doctor", "model", REPO)

    assert code == 0
    assert f"not downloaded yet: remora pull {REPO}" in text
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]
