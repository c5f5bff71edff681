"""Command lines and files as the documentation of the servers shows them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from remora.configs.dialects.catalogue import System
from remora.configs.dialects.command_line import read_command_line
from remora.configs.dialects.resolve import resolve
from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig


def configured(system: System, line: str, environ: dict[str, str] | None = None) -> ServeConfig:
    return parse_args(meant(system, line, environ).args)


def meant(system: System, line: str, environ: dict[str, str] | None = None) -> Any:
    given = read_command_line(system, shlex.split(line), environ or {})
    return resolve({"dialect": system, "args": given})


def test_a_launching_command_in_front_is_passed_over() -> None:
    line = (
        "python3 -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-8B-Instruct "
        "--host 0.0.0.0 --port 30001 --tp 2 --mem-fraction-static 0.8 --chunked-prefill-size 4096"
    )
    resolved = meant("sglang", line)
    config = parse_args(resolved.args)
    assert resolved.http == {"host": "0.0.0.0", "port": 30001}
    assert config.parallel.tp_size == 2
    assert config.engine.total_mem_fraction == 0.8
    assert config.engine.prefill_chunk_tokens == 4096


@pytest.mark.observes("sglang:--config")
def test_the_command_line_wins_over_the_file_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model-path: meta-llama/Meta-Llama-3-8B-Instruct\nhost: 0.0.0.0\n"
        "tensor-parallel-size: 2\nmax_running_requests: 8\ndisable-radix-cache: true\n"
    )
    config = configured("sglang", f"--config {file} --max-running-requests 16")
    assert config.model.path == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert config.parallel.tp_size == 2
    assert config.engine.max_running_requests == 16
    assert not config.engine.prefix_cache


def test_lightllm_as_its_documentation_launches_it() -> None:
    line = (
        "python -m lightllm.server.api_server --model_dir /models/llama-8b --tp 2 "
        "--max_total_token_num 120000"
    )
    config = configured("lightllm", line)
    assert config.model.path == "/models/llama-8b"
    assert (config.parallel.tp_size, config.engine.kv_tokens) == (2, 120_000)
    assert config.api.generate_dialect == "lightllm"


def test_rtp_llm_reads_its_variables_below_its_options() -> None:
    environ = {"CHECKPOINT_PATH": "/models/qwen", "TP_SIZE": "2", "REUSE_CACHE": "1"}
    config = configured("rtp_llm", "--tp_size 3 --enable-fast-gen true", environ)
    assert config.model.path == "/models/qwen"
    assert config.parallel.tp_size == 3
    assert config.engine.prefix_cache


def test_the_backend_s_two_documents_are_one_configuration(tmp_path: Path) -> None:
    optimisation = {
        "backend": {"name": "auto", "version": "latest", "extra_params": {"context_length": 512}},
        "warmups": {"enabled": True, "iterations": 5, "sample_input_data": []},
        "model_type": "llm",
        "quantization": "float16",
        "optimisations": {
            "model_type": "llm",
            "attention_caching": {"type": "auto", "enabled": False, "extra_params": {}},
            "speculative_decoding": {"type": "auto", "enabled": False, "extra_params": {}},
        },
        "tensor_parallel_size": 1,
    }
    pipeline = {
        "type": "llm",
        "mode": "chat",
        "loras": [],
        "lora_repo": {"path": "", "type": "", "ownership": "", "secret": {"type": ""}},
    }
    files = [tmp_path / "optimisation.json", tmp_path / "pipeline.json"]
    for file, document in zip(files, (optimisation, pipeline), strict=True):
        file.write_text(json.dumps(document))
    given = read_command_line("backend", [str(file) for file in files], {})
    both = {"optimization": optimisation, "pipeline": pipeline}
    for data in (given, both):
        args = {"dialect": "backend", "args": data, "model": {"path": "m"}}
        config = parse_args(args)
        assert config.model.context_length == 512
        assert config.api.generation == "chat"
        assert not config.engine.prefix_cache


def test_an_unambiguous_short_form_is_accepted() -> None:
    assert configured("sglang", "--model x --max-run 7").engine.max_running_requests == 7


@pytest.mark.observes("rtp_llm:--world-size")
def test_the_size_of_the_world_must_be_that_of_its_parts() -> None:
    line = "--checkpoint-path x --tp-size 3 --dp-size 2 --world-size "
    assert configured("rtp_llm", line + "6").parallel.tp_size == 3
    with pytest.raises(ConfigError, match=r"--world-size = 4: refused: .* 3 \* 2 = 6"):
        configured("rtp_llm", line + "4")


def test_first_tokens_are_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "--model_dir x --first_token_constraint_mode"
    monkeypatch.setenv("FIRST_ALLOWED_TOKENS", "5, 7")
    assert configured("lightllm", line).grammar.first_token_ids == [5, 7]
    monkeypatch.setenv("FIRST_ALLOWED_TOKENS", "five")
    with pytest.raises(ConfigError, match=r"FIRST_ALLOWED_TOKENS is 'five'"):
        configured("lightllm", line)
