"""Targets of commands: files, models and command lines of other servers."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from remora.deployments.cli.main import app
from remora.deployments.cli.serve import serve_config

HEAD = "applications:\n  - import_path: remora.deployments.app:build\n    args:\n"


def make_file(folder: Path, args: str, name: str = "a.yaml", above: str = "") -> str:
    path = folder / name
    path.write_text(f"{above}{HEAD}{args}")
    return str(path)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.observes("http.host", "http.port")
def test_another_server_s_host_and_port_are_used(tmp_path: Path) -> None:
    model = str(tmp_path)
    for dialect, tokens, http in (
        ("sglang", ["--model-path", model, "--port", "31000"], ("127.0.0.1", 31000)),
        ("lightllm", ["--model_dir", model, "--host", "0.0.0.0"], ("0.0.0.0", 8000)),
        ("rtp_llm", ["--checkpoint-path", model], ("0.0.0.0", 8088)),
        ("vllm", ["vllm", "serve", model], ("0.0.0.0", 8000)),
    ):
        raw = serve_config(tokens, dialect=dialect)
        assert (raw["http_options"]["host"], raw["http_options"]["port"]) == http
        assert raw["applications"][0]["args"]["model"]["path"] == model
        changed = serve_config(tokens, dialect=dialect, port=9)["http_options"]
        assert changed["port"] == 9


def test_a_file_s_own_http_options_win_over_those_of_the_dialect(tmp_path: Path) -> None:
    args = "      dialect: sglang\n      args: {model-path: m, host: 0.0.0.0, port: 30000}\n"
    file = make_file(tmp_path, args, above="http_options: {port: 1234}\n")
    http = serve_config([file])["http_options"]
    assert http == {"host": "0.0.0.0", "port": 1234}


def test_our_sections_take_precedence_over_a_dialect(tmp_path: Path) -> None:
    args = "      dialect: sglang\n      args: {model-path: m, page-size: 32}\n"
    file = make_file(tmp_path, args + "      engine: {page_size: 64}\n")
    assert serve_config([file])["applications"][0]["args"]["engine"]["page_size"] == 64
    code, text, _ = run("config", "explain", file)
    assert code == 0
    assert "engine.page_size                   64                       line 6" in text


def test_check_shows_how_each_parameter_is_translated() -> None:
    code, text, _ = run(
        "config", "check", "--dialect", "sglang", "--", "--model-path", "m",
        "--max-prefill-tokens", "1024", "--enable-p2p-check", "--tp", "2",
    )  # fmt: skip
    assert code == 0
    assert "--tp = 2: exact: parallel.tp_size = 2" in text
    assert "--enable-p2p-check = true: no effect here: nccl detects" in text
    assert "sglang: keys and values are valid, but" in text  # there is no model m


def test_convert_says_what_is_lost() -> None:
    code, text, notes = run(
        "config", "convert", "--from", "sglang", "--to", "lightllm", "--",
        "--model-path", "/m", "--tp", "2", "--page-size", "32",
    )  # fmt: skip
    assert code == 0
    assert "--model_dir /m" in text
    assert "--tp 2" in text
    assert "engine.page_size = 32: LightLLM has no equivalent" in notes


def test_convert_writes_a_valid_file(tmp_path: Path) -> None:
    code, text, _ = run("config", "convert", "--from", "lightllm", "--", "--model_dir", "/m")
    assert code == 0
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert run("config", "check", str(path))[0] == 0
    assert yaml.safe_load(text)["http_options"] == {"host": "127.0.0.1", "port": 8000}


def test_diff_shows_what_differs(tmp_path: Path) -> None:
    model = "      model: {path: m}\n"
    first = make_file(tmp_path, model)
    second = make_file(tmp_path, model + "      engine: {page_size: 32}\n", "b.yaml")
    assert run("config", "diff", first, second)[:2] == (1, "engine.page_size: 16 -> 32\n")
    assert run("config", "diff", first, first)[:2] == (0, "")


def test_init_writes_a_file_and_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    assert run("config", "init", "--profile", "gpu", str(path))[0] == 0
    assert (tmp_path / "remora.schema.json").is_file()
    assert run("config", "check", str(path))[0] == 0
    code, _, error = run("config", "init", str(path))
    assert code == 2
    assert "exists; choose another name" in error


def test_coverage_as_table_and_json() -> None:
    code, text, _ = run("config", "coverage", "--system", "backend")
    assert code == 0
    assert "tensor_parallel_size" in text
    rows = yaml.safe_load(run("config", "coverage", "--format", "json")[1])
    assert len(rows) == 844
    assert rows[0].keys() == {
        *("system", "name", "canonical", "state", "accepts", "reason", "test")
    }
    assert run("config", "coverage", "--system", "ollama")[0] == 2


def test_rtp_llm_s_variables_alone_are_a_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKPOINT_PATH", str(tmp_path))
    monkeypatch.setenv("REUSE_CACHE", "0")
    code, text, _ = run("config", "explain", "--dialect", "rtp_llm")
    assert code == 0
    assert "engine.prefix_cache                false                    REUSE_CACHE" in text
    assert run("config", "check")[0] == 2
