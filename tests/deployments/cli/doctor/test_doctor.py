"""The findings of `remora doctor` on made-up machines."""

from __future__ import annotations

import re
import socket
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remora.configs.environment import cache_dir
from remora.deployments.cli.doctor import extras, findings
from remora.deployments.cli.doctor.findings import Finding, Level
from remora.deployments.cli.main import app
from remora.kernels.cpu.build import build_library
from remora.kernels.cpu.prebuilt import VARIANTS
from tests.configs.planning.test_plan import GIB, make_machine
from tests.conftest import TinyCheckpoints

ROOT = Path(__file__).resolve().parents[4]


def by_subject(found: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in found}


def test_little_memory_and_an_old_processor_are_warnings() -> None:
    capable = findings.check_machine(make_machine(cpu_features=("avx2",)))
    assert {finding.level for finding in capable} == {Level.OK}

    found = by_subject(findings.check_machine(make_machine(GIB, cpu_features=("asimd_not",))))

    assert found["memory"].level is Level.WARN
    assert found["features"].level is Level.WARN


def test_a_package_that_cannot_be_imported_must_be_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_MODULES", ("no_such_package_anywhere",))

    found = by_subject(findings.check_versions())

    assert found["no_such_package_anywhere"].level is Level.FIX
    assert "make setup" in found["no_such_package_anywhere"].text


@pytest.mark.parametrize(
    ("surroundings", "level", "shown"),
    [
        ("model", Level.OK, "holds"),
        ("absent", Level.OK, "smollm2"),
        ("file", Level.FIX, "REMORA_CACHE"),
        ("full", Level.FIX, "REMORA_CACHE"),
    ],
)
def test_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surroundings: str, level: Level, shown: str
) -> None:
    folder = tmp_path / "a" / "b"
    monkeypatch.setenv("REMORA_CACHE", str(folder))
    if surroundings == "model":
        (folder / "smollm2-135m-instruct").mkdir(parents=True)
        (folder / "smollm2-135m-instruct" / "config.json").write_text("{}")
    elif surroundings == "file":
        (tmp_path / "a").write_text("")
    elif surroundings == "full":
        monkeypatch.setattr(findings, "_MODEL_BYTES", 2**62)

    finding = findings.check_cache()

    assert finding.level is level
    assert shown in finding.text
    assert surroundings != "absent" or not (tmp_path / "a").exists()


def test_kernels_are_compiled_or_prebuilt_or_can_be_or_torch_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler -O2")
    none = findings.check_kernels()
    prebuilt = [(VARIANTS[0], tmp_path / "amx.so")]
    with monkeypatch.context() as wheel:
        wheel.setattr(findings, "find_prebuilt", lambda: iter(prebuilt))
        ready = findings.check_kernels()
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != "-o" ]; do shift; done\necho > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    possible = findings.check_kernels()
    library = build_library(tmp_path / "kernels")
    monkeypatch.setattr(findings, "find_prebuilt", lambda: iter(prebuilt))
    compiled = findings.check_kernels()

    levels = [finding.level for finding in (none, ready, possible, compiled)]
    assert levels == [Level.WARN, Level.OK, Level.OK, Level.OK]
    assert "/no/such/compiler" in none.text
    assert ready.text == f"native, prebuilt for amx: {tmp_path / 'amx.so'}"
    assert f"compiled by {compiler} at the first start" in possible.text
    assert compiled.text == f"native, compiled for this machine: {library}"


def test_rates_of_compiled_kernels_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_library(
        cache_dir() / "kernels"
    )  # in the user's cache, so that runs of the tests share it
    (found,) = findings.check_products()
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path))

    assert re.search(r"float32 \d+, bfloat16 by .* \d+, int8 \d+", found.text)
    assert not list(findings.check_products())  # not compiled there


def test_a_port_in_use_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = findings.check_port(port=server.getsockname()[1])

    assert taken.level is Level.WARN
    assert "--port" in taken.text


def test_a_model_s_plan_is_shown_or_that_it_does_not_fit(tiny_checkpoints: TinyCheckpoints) -> None:
    model = str(tiny_checkpoints("llama"))
    found = by_subject(findings.check_model(model, make_machine(num_cores=2)))

    assert found["would use"].text.startswith("cpu, float32, quantization none, 2 threads")
    assert "for 32,768 tokens" in found["KV cache"].text
    (too_small,) = findings.check_model(model, make_machine(available_bytes=1000))
    assert too_small.level is Level.FIX


def test_a_missing_model_must_be_fixed_and_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(findings, "check_versions", lambda: iter(()))

    result = CliRunner().invoke(app, ["doctor", "--model", "/no/such/folder"])

    assert result.exit_code == 2
    assert "fix  model" in result.stdout
    assert "processor" in result.stdout


def test_with_nothing_to_fix_the_exit_code_is_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_checkpoints: TinyCheckpoints
) -> None:
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path))
    monkeypatch.setattr(findings, "_MODULES", ("yaml",))
    monkeypatch.setattr(findings, "version", lambda _package: "1")

    result = CliRunner().invoke(app, ["doctor", "--model", str(tiny_checkpoints("llama"))])

    assert result.exit_code == 0, result.stdout


def test_extras_are_listed_with_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "numpy>=1",
        'pytest>=1; extra == "s3"',
        "no-such-package; a == 'b' and extra == 'otel'",
    ]
    monkeypatch.setattr(extras, "requires", lambda _name: [*lines, 'x; extra == "dev"'])

    found = dict(extras.find_extras())

    assert found.keys() == {"s3", "otel"}
    assert found["s3"] == f"models and adapters at s3://: pytest {pytest.__version__}"
    assert found["otel"].endswith("not installed: no-such-package; pip install 'remora[otel]'")


def test_every_extra_for_users_has_a_purpose() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert extras.PURPOSES.keys() == project["optional-dependencies"].keys() - {"docs", "dev"}
