"""`remora quantize` on tiny models: it writes what is served, and refuses wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from remora.deployments.bench.quality import TEXT
from remora.deployments.cli.main import app
from tests.conftest import TinyCheckpoints
from tests.tiny_models import CORPUS


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


@pytest.fixture(name="text")
def make_text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("\n".join(CORPUS * 4))
    return file


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_checkpoint_is_written_and_measured(
    method: str, tiny_checkpoints: TinyCheckpoints, text: Path, tmp_path: Path
) -> None:
    path, report = tiny_checkpoints("llama"), tmp_path / "report.json"
    sizes = ("--windows", 3, "--window-tokens", 40)

    result = run(
        path, tmp_path / "out", "--method", method, "--text", text, "--json", report, *sizes
    )

    assert result.exit_code == 0, result.stderr
    assert f"{method}, 5.12 bits a weight" in result.stdout  # scales are float32, as the weights
    before, after = json.loads(report.read_text())["results"]
    assert before["workload"] == "reference"
    assert after["workload"] == f"{method} 4 bits"
    assert 0 < after["figures"]["perplexity_ratio_error"] < 1
    assert after["figures"]["kl_nats"] > 0


def test_a_file_calibrates(tiny_checkpoints: TinyCheckpoints, text: Path, tmp_path: Path) -> None:
    sizes = ("--windows", 3, "--window-tokens", 40)

    result = run(
        tiny_checkpoints("llama"), tmp_path / "out", "--calibration", text, "--no-measure", *sizes
    )

    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_text_that_is_measured_does_not_calibrate(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    words = TEXT.read_text().split()
    file = tmp_path / "mine.txt"
    file.write_text(" ".join(["my own words", *words[100:108], "end here"]) * 40)

    result = run(tiny_checkpoints("llama"), tmp_path / "out", "--calibration", file)

    assert result.exit_code == 2
    assert "shares 8 words in a row with the text that is measured" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--group-size", "64"), "possible group sizes: 32"),
        (("--method", "round", "--calibration", "pyproject.toml"), "uses no calibration text"),
        (("--calibration", "/no/such/file"), "cannot read /no/such/file"),
        (("--text", "/no/such/file"), "cannot read /no/such/file"),
        (("--bits", "3"), "'4', '8'"),
        (("--method", "magic"), "'gptq', 'awq', 'round'"),
    ],
)
def test_wrong_arguments_end_it_at_once(
    arguments: tuple[str, ...], message: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    result = run(tiny_checkpoints("llama"), out, *arguments)

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not out.exists()


def test_a_short_calibration_text_is_refused(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    file = tmp_path / "short.txt"
    file.write_text("Too short.")

    result = run(tiny_checkpoints("llama"), tmp_path / "out", "--calibration", file)

    assert result.exit_code == 2
    assert "the calibration text has" in result.stderr


def test_an_existing_folder_is_refused(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    result = run(tiny_checkpoints("llama"), tmp_path)

    assert result.exit_code == 2
    assert "exists; give the name of a new folder" in result.stderr


def test_a_model_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    result = run("no-such-model", tmp_path / "out")

    assert result.exit_code == 2
    assert "no model 'no-such-model'" in result.stderr
