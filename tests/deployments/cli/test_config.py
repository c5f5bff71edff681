"""`remora config` on files as an operator writes them; test_target.py has other targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remora.deployments.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
HEAD = "applications:\n  - import_path: remora.deployments.app:build\n    args:\n"


def make_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return str(path)


def test_the_shipped_file_is_valid() -> None:
    result = CliRunner().invoke(app, ["config", "check", str(ROOT / "configs" / "smollm2.yaml")])

    assert result.exit_code == 0, result.stderr
    assert "valid; serves smollm2-135m-instruct" in result.stdout


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        (
            ["--dialect", "sglang", "--", "--model-path", "no/such/folder"],
            "OWNER/NAME of the hub",
        ),
        (["FILE"], "set it to a Hugging Face folder"),
    ],
)
def test_a_model_that_is_not_there_is_not_called_valid(
    tmp_path: Path, target: list[str], advice: str
) -> None:
    file = make_file(tmp_path, HEAD + "      model: {path: /no/such}\n")
    tokens = [file if token == "FILE" else token for token in target]

    result = CliRunner().invoke(app, ["config", "check", *tokens])

    *_, fault, verdict = result.stdout.splitlines()
    assert result.exit_code == 0, result.stderr
    assert fault.startswith("missing here: ")
    assert advice in fault
    assert "refuses to start: 1 missing" in verdict
    assert ": valid; serves" not in verdict


def test_files_that_an_environment_may_bring_are_not_looked_for(tmp_path: Path) -> None:
    text = HEAD + "      model: {path: /no/such}\n    runtime_env: {working_dir: 's3://a/b.zip'}\n"

    result = CliRunner().invoke(app, ["config", "check", make_file(tmp_path, text)])

    assert result.stdout.splitlines()[-1].endswith(": valid; serves /no/such")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEAD + "      model: {pth: x}\n", ":4:15: model.pth = 'x': unknown key"),
        (None, "no such file"),
    ],
)
def test_a_fault_is_one_line_on_stderr_and_exit_code_2(
    tmp_path: Path, text: str | None, expected: str
) -> None:
    file = str(tmp_path / "none.yaml") if text is None else make_file(tmp_path, text)

    result = CliRunner().invoke(app, ["config", "check", file])

    assert result.exit_code == 2
    assert expected in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_the_schema_is_json_or_the_documentation_page() -> None:
    schema, page = (
        CliRunner().invoke(app, ["config", "schema", *flags]).stdout
        for flags in ([], ["--markdown"])
    )
    assert "engine" in json.loads(schema)["properties"]
    assert page == (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_explain_distinguishes_written_values_from_defaults(tmp_path: Path) -> None:
    file = make_file(tmp_path, HEAD + "      model: {path: x}\n      engine: {page_size: 8}\n")

    result = CliRunner().invoke(app, ["config", "explain", file])

    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert lines["engine.page_size"][1:4] == ["8", "line", "5"]
    assert lines["engine.device"][1:3] == ["'auto'", "default"]


def test_reply_formats_are_listed_with_their_aliases() -> None:
    result = CliRunner().invoke(app, ["config", "parsers"])

    assert result.exit_code == 0, result.stderr
    tools, reasoning = result.stdout.split("api.reasoning_parser")
    assert tools.startswith("api.tool_parser: auto")
    assert "hermes         qwen25, qwen" in tools
    assert "deepseek-r1    deepseek_r1" in reasoning
    assert "gpt-oss        gpt_oss, openai, harmony" in tools
    assert "gpt-oss        gpt_oss, openai, harmony" in reasoning
