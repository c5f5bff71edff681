"""docs/migrating.md: its commands run, its keys and our metrics exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from remora.configs.schema import ServeConfig
from remora.deployments.cli.main import app
from tests.configs.dialects.launch_commands import FILES
from tests.deployments.fakes import FakeServer, make_client

PAGE = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.split("\n")
]
SPECULATIVE = {"remora_draft_tokens_total", "remora_accepted_drafts_total"}


def with_files(command: str, folder: Path) -> list[str]:
    """Return the tokens of a command, without the program, with files that are there."""
    (folder / "model").mkdir()
    whole, bare = folder / "whole.yaml", folder / "bare.yaml"
    whole.write_text(FILES[0].text.replace("MODEL", str(folder / "model")))
    bare.write_text(FILES[1].text.replace("MODEL", str(folder / "model")))
    names = {"MODEL": folder / "model", "serve_config.yaml": whole, "llm_config.yaml": bare}
    tokens = shlex.split(command.partition(" > ")[0])[1:]
    return [str(names.get(token, token)) for token in tokens]


@pytest.mark.parametrize("command", [line for line in COMMANDS if line])
def test_commands_run(command: str, tmp_path: Path) -> None:
    tokens = with_files(command, tmp_path)
    if tokens[0] == "chat":
        return
    if tokens[0] == "serve":  # what it would serve
        tokens = ["config", "check", *_without_port(tokens[1:])]
    result = CliRunner().invoke(app, tokens)
    assert result.exit_code == 0, result.output
    assert "missing here" not in result.output


def _without_port(tokens: list[str]) -> list[str]:
    if "--port" not in tokens or "--" in tokens:
        return tokens
    at = tokens.index("--port")
    return [*tokens[:at], *tokens[at + 2 :]]


def test_keys_exist() -> None:
    sections = {name: field.annotation for name, field in ServeConfig.model_fields.items()}
    for section, key in re.findall(r"`(?:--set )?([a-z]+)\.([a-z_]+)(?:=[^`]*|: [^`]*)?`", PAGE):
        if section in sections:
            assert key in getattr(sections[section], "model_fields", {}), f"{section}.{key}"


def test_our_commands_exist() -> None:
    known = getattr(get_command(app), "commands", {})
    for name in re.findall(r"`remora ([a-z]+)", PAGE):
        assert name in known


async def test_our_metrics_exist() -> None:
    async with make_client(FakeServer()) as client:
        text = (await client.get("/metrics")).text
    named = set(re.findall(r"`(remora_[a-z0-9_]+)`", PAGE))
    assert named
    for name in named - SPECULATIVE:
        assert f"# TYPE {name} " in text, name
