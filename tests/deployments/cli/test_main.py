"""The command itself: its summary, its version, what it imports, and completion by shells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from remora.configs.version import __version__
from remora.deployments.cli.main import app
from remora.deployments.cli.terminal import LazyCommands

COMMANDS = ["serve", "chat", "generate", "plan", "compile", "bench", "doctor", "config", "lora"]
HEAVY = {"torch", "ray", "transformers", "fastapi", "numpy"}
# As the command that pip installs: completion scripts are named after it.
PROGRAM = "import sys; sys.argv[0] = 'remora'; from remora.deployments.cli.entry import main; "


@pytest.fixture(scope="module")
def command() -> LazyCommands:
    group = typer.main.get_command(app)
    assert isinstance(group, LazyCommands)
    return group


def run(*arguments: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"{PROGRAM}main()", *arguments],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code", "shown"),
    [
        (["--help"], 0, COMMANDS),
        (["--version"], 0, [f"remora {__version__}\n"]),
        (["serv"], 2, []),
    ],
)
def test_the_command_itself(arguments: list[str], exit_code: int, shown: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == exit_code
    assert [text for text in shown if text not in result.stdout] == []
    assert "Traceback" not in result.output


def test_summaries_are_those_of_the_commands(command: LazyCommands) -> None:
    shown = {name: stub.help for name, stub in command.commands.items()}
    meant = {name: command.load(name).help.split("\n\n")[0] for name in command.commands}

    assert shown == meant


def test_the_help_imports_no_command_and_no_command_a_heavy_library() -> None:
    code = (
        "import sys, typer.main; from remora.deployments.cli.main import app; "
        "print(sorted(name for name in sys.modules if name.startswith('remora.'))); "
        "group = typer.main.get_command(app); [group.load(name) for name in group.commands]; "
        f"print({HEAVY} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours, heavy = done.stdout.splitlines()

    names = ["configs", "configs.errors", "configs.version"]
    names += ["deployments", "deployments.cli", "deployments.cli.main", "deployments.cli.terminal"]
    assert ours == str([f"remora.{name}" for name in names])
    assert heavy == "set()"


@pytest.mark.parametrize(
    ("words", "offered", "missing"),
    [
        ("remora ser", "serve", "doctor"),
        ("remora doctor mo", "model", "serve"),
        ("remora plan --di", "--dialect", "--set"),
    ],
)
def test_a_shell_completes_commands_and_options(words: str, offered: str, missing: str) -> None:
    last = str(len(words.split()) - 1)
    found = run(_REMORA_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=last).split()

    assert offered in found
    assert missing not in found


def test_completion_is_installed_into_the_files_of_a_shell(tmp_path: Path) -> None:
    said = run(
        "--install-completion",
        "bash",
        HOME=str(tmp_path),
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1",
    )

    script = tmp_path / ".bash_completions" / "remora.sh"
    assert "_REMORA_COMPLETE=complete_bash" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()
    assert str(script) in said.replace("\n", "")
