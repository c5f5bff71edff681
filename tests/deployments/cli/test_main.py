from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from remora.deployments.cli.main import app


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])

    assert result.exit_code == 0
    missing = [
        name
        for name in ("serve", "chat", "generate", "config", "doctor", "compile")
        if name not in result.stdout
    ]
    assert missing == []


def test_help_is_quick_because_neither_torch_nor_ray_is_imported() -> None:
    code = (
        "import sys; from remora.deployments.cli.main import app; "
        "print({'torch', 'ray', 'transformers', 'fastapi', 'numpy'} & set(sys.modules))"
    )

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "set()"


def test_the_version_is_shown() -> None:
    result = CliRunner().invoke(app, ["--version"])

    assert result.exit_code == 0
    assert result.stdout.startswith("remora ")


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(app, ["serv"])

    assert result.exit_code == 2
    assert "Traceback" not in result.output
