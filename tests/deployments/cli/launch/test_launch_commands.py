"""Launch commands and files of other servers' documentation, through `remora config`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from remora.deployments.cli.main import app
from tests.configs.dialects.launch_commands import COMMANDS, FILES, FURTHER, Launch

OURS = "applications:\n- import_path: remora.deployments.app:build\n  args:\n"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def tokens_of(launch: Launch, folder: Path) -> list[str]:
    """Return the command with models and adapters that are there."""
    (folder / "draft").mkdir()
    (folder / "model").mkdir()
    text = launch.text.replace(launch.model, "MODEL")
    for name, path in {"MODEL": "model", "DRAFT": "draft", "ADAPTER": "draft"}.items():
        text = text.replace(name, str(folder / path))
    return shlex.split(text)


def file_of(launch: Launch, folder: Path) -> str:
    (folder / "model").mkdir()
    path = folder / "serve.yaml"
    path.write_text(launch.text.replace("MODEL", str(folder / "model")))
    return str(path)


def number(launch: Launch) -> str:
    return launch.source.rpartition("/")[2]


@pytest.mark.parametrize("launch", [*COMMANDS, *FURTHER], ids=number)
def test_commands_of_vllm(launch: Launch, tmp_path: Path) -> None:
    tokens = tokens_of(launch, tmp_path)
    code, text = run("config", "check", "--dialect", "vllm", "--", *tokens)
    if launch.refused:
        assert code != 0
        assert launch.refused in text
        return
    assert code == 0, text
    assert "missing here" not in text
    code, converted = run("config", "convert", "--from", "vllm", "--", *tokens)
    file = tmp_path / "ours.yaml"
    file.write_text(converted[converted.index("proxy_location") :].partition("\n--")[0])
    args = yaml.safe_load(file.read_text())["applications"][0]["args"]
    assert args["model"]["path"] == str(tmp_path / "model")
    code, text = run("config", "check", str(file))
    assert code == 0, text


@pytest.mark.parametrize("launch", FILES, ids=number)
def test_files_of_ray_serve_llm(launch: Launch, tmp_path: Path) -> None:
    file = file_of(launch, tmp_path)
    code, text = run("config", "check", "--dialect", "ray_serve_llm", "--", file)
    if launch.refused:
        assert code != 0
        assert f"{file}:" in text  # with line and column
        assert launch.refused in text
        return
    assert code == 0, text
    assert "missing here" not in text
    if "applications" in launch.text:  # a Serve config file needs no option
        assert run("config", "check", file)[0] == 0


def test_most_are_accepted() -> None:
    assert len(COMMANDS) == 20
    assert len(FILES) == 6
    assert sum(not launch.refused for launch in (*COMMANDS, *FILES)) >= 18


def test_most_start() -> None:
    """What `test_started.py` and `test_started_ray.py` run."""
    started = [each for each in (*COMMANDS, *FILES) if not (each.refused or each.stops)]
    assert len(started) >= 18
