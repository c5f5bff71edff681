from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from remora.deployments.cli.main import app

COMMANDS = ["serve", "chat", "generate", "plan", "compile", "bench", "doctor", "config", "lora"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "shown"),
    [(["--help"], 0, COMMANDS), (["--version"], 0, ["remora "]), (["serv"], 2, [])],
)
def test_the_command_itself(arguments: list[str], exit_code: int, shown: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == exit_code
    assert [text for text in shown if text not in result.stdout] == []
    assert "Traceback" not in result.output


def test_help_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from remora.deployments.cli.main import app; "
        "print({'torch', 'ray', 'transformers', 'fastapi', 'numpy'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "set()"
