"""`remora compile` with a shell script as compiler: a real one takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from remora.deployments.cli.main import app
from remora.kernels.cpu.build import hash_sources
from remora.kernels.cpu.prebuilt import VARIANTS

WRITES_WHAT_FOLLOWS_O = """#!/bin/sh
echo call >> "$(dirname "$0")/calls"
while [ "$1" != "-o" ]; do shift; done
echo library > "$2"
"""


def make_compiler(folder: Path, script: str) -> Path:
    program = folder / "compiler"
    program.write_text(script)
    program.chmod(0o755)
    return program


def test_the_library_is_made_once_and_its_path_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, WRITES_WHAT_FOLLOWS_O)))
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path / "cache"))

    first = CliRunner().invoke(app, ["compile"])
    calls = (tmp_path / "calls").read_text()
    second = CliRunner().invoke(app, ["compile"])

    path = Path(first.stdout.split(" (")[0])
    assert path.parent == tmp_path / "cache" / "kernels"
    assert path.read_text() == "library\n"
    assert second.stdout.split(" (")[0] == str(path)
    assert (tmp_path / "calls").read_text() == calls != ""


def test_a_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path))

    result = CliRunner().invoke(app, ["compile"])

    assert result.exit_code == 2
    assert "no C++ compiler was found" in result.stderr


def test_libraries_for_a_wheel_are_made_where_there_are_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, WRITES_WHAT_FOLLOWS_O)))
    monkeypatch.setenv("PATH", "/usr/bin/nowhere")
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    folder = tmp_path / "lib"

    result = CliRunner().invoke(app, ["compile", "--into", str(folder)])

    names = {each.file_name(hash_sources()) for each in VARIANTS if each.machine == "x86_64"}
    assert {path.name for path in folder.iterdir()} == names
    assert "nothing for aarch64: aarch64-linux-gnu-g++ was not found" in result.stdout


def test_one_kind_of_cpu_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, WRITES_WHAT_FOLLOWS_O)))
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    command = ["compile", "--into", str(tmp_path / "lib"), "--variant"]

    assert CliRunner().invoke(app, [*command, "avx2"]).exit_code == 0
    assert len(list((tmp_path / "lib").iterdir())) == 1
    unknown = CliRunner().invoke(app, [*command, "sse9"])
    assert unknown.exit_code == 2
    assert "unknown variants sse9; allowed are amx," in unknown.stderr
