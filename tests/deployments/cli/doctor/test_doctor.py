"""What `remora doctor` finds, in made-up surroundings."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remora.configs.facts import MachineFacts
from remora.deployments.cli.doctor import findings
from remora.deployments.cli.doctor.findings import Finding, Level
from remora.deployments.cli.main import app
from remora.kernels.cpu.build import best_instruction_set, read_cpu_flags

GIB = 2**30


def make_machine(
    available_bytes: int = 8 * GIB, features: tuple[str, ...] = ("avx2",)
) -> MachineFacts:
    return MachineFacts(
        num_cores=2,
        total_bytes=16 * GIB,
        available_bytes=available_bytes,
        cpu_name="Test CPU",
        cpu_features=features,
        devices=("cpu",),
    )


def make_model(folder: Path) -> str:
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def by_subject(found: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in found}


def test_a_capable_machine_is_fine() -> None:
    found = list(findings.check_machine(make_machine()))

    assert {finding.level for finding in found} == {Level.OK}


def test_little_memory_and_an_old_processor_are_warned_of() -> None:
    found = by_subject(list(findings.check_machine(make_machine(GIB, ("asimd_not",)))))

    assert found["memory"].level is Level.WARN
    assert found["features"].level is Level.WARN


def test_a_package_that_cannot_be_imported_is_to_be_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_MODULES", ("no_such_package_anywhere",))

    found = by_subject(list(findings.check_versions()))

    assert found["no_such_package_anywhere"].level is Level.FIX
    assert "make setup" in found["no_such_package_anywhere"].text


def test_a_cache_that_holds_the_model_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path))
    (tmp_path / "smollm2-135m-instruct").mkdir()
    (tmp_path / "smollm2-135m-instruct" / "config.json").write_text("{}")

    assert "holds" in findings.check_cache().text


def test_a_cache_yet_to_be_made_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path / "a" / "b"))

    finding = findings.check_cache()

    assert finding.level is Level.OK
    assert not (tmp_path / "a").exists()


def test_a_cache_that_is_a_file_is_to_be_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path / "file"))

    assert findings.check_cache().level is Level.FIX


def test_a_full_disk_is_to_be_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path))
    monkeypatch.setattr(findings, "_MODEL_BYTES", 2**62)

    finding = findings.check_cache()

    assert finding.level is Level.FIX
    assert "make room or set REMORA_CACHE" in finding.text


def test_kernels_are_compiled_or_can_be_or_torch_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler -O2")
    none = findings.check_kernels()
    monkeypatch.setenv("CXX", "/bin/sh")
    possible = findings.check_kernels()
    (tmp_path / "kernels").mkdir()
    target = best_instruction_set(read_cpu_flags())
    (tmp_path / "kernels" / f"remora-cpu-{target}-0123.so").touch()
    compiled = findings.check_kernels()

    assert (none.level, possible.level, compiled.level) == (Level.WARN, Level.OK, Level.OK)
    assert "/no/such/compiler" in none.text
    assert "compiled by /bin/sh at the first start" in possible.text
    assert str(tmp_path / "kernels") in compiled.text


def test_a_port_in_use_is_warned_of() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = findings.check_port(port=server.getsockname()[1])

    assert taken.level is Level.WARN
    assert "--port" in taken.text


def test_the_plan_of_a_model_is_shown(tmp_path: Path) -> None:
    found = by_subject(list(findings.check_model(make_model(tmp_path / "m"), make_machine())))

    assert found["would use"].text.startswith("cpu, float32, quantization none, 2 threads")
    assert "for 32,768 tokens" in found["KV cache"].text


def test_a_model_that_does_not_fit_is_to_be_fixed(tmp_path: Path) -> None:
    machine = make_machine(available_bytes=1000)

    found = list(findings.check_model(make_model(tmp_path / "m"), machine))

    assert [finding.level for finding in found] == [Level.FIX]
    assert "too few" in found[0].text


def test_a_model_that_is_not_there_is_to_be_fixed_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(findings, "check_versions", lambda: iter(()))

    result = CliRunner().invoke(app, ["doctor", "--model", "/no/such/folder"])

    assert result.exit_code == 2
    assert "fix  model" in result.stdout
    assert "processor" in result.stdout


def test_with_nothing_to_fix_the_exit_code_is_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path))
    monkeypatch.setattr(findings, "_MODULES", ("yaml",))
    monkeypatch.setattr(findings, "version", lambda _package: "1")

    result = CliRunner().invoke(app, ["doctor", "--model", make_model(tmp_path / "m")])

    assert result.exit_code == 0, result.stdout
