"""vLLM's command line and arguments: spellings, values that depend on others, refusals."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.command_line import read_command_line
from remora.configs.dialects.convert import convert, settings_of, written
from remora.configs.dialects.faults import Faults
from remora.configs.dialects.translate import translate
from remora.configs.dialects.vllm.options import command_line, options
from remora.configs.dialects.vllm.parsers import REASONING_NAMES, TOOL_NAMES
from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig
from remora.deployments.parsers.format_choice import reasoning_parser_names, tool_parser_names

OTHER = Path(__file__).with_name("other_model")


def read(line: str) -> dict[str, Any]:
    return read_command_line("vllm", shlex.split(line), {})


def settings(line: str) -> dict[str, Any]:
    """Return the settings of a command line, by dotted key."""
    return settings_of(translate(DIALECTS["vllm"], read(line)).args)


def configured(line: str) -> ServeConfig:
    return parse_args({"dialect": "vllm", "args": read(line)})


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("vllm serve m", {"--model": "m"}),
        ("vllm serve m -tp 2", {"--model": "m", "--tensor-parallel-size": "2"}),
        ("vllm serve -tp=2 m", {"--tensor-parallel-size": "2", "--model": "m"}),
        ("A=1 /bin/vllm serve --enforce-eager m", {"--enforce-eager": True, "--model": "m"}),
        ("python -m vllm.entrypoints.openai.api_server --model m", {"--model": "m"}),
        ("docker run --gpus all x/vllm-openai:latest m", {"--model": "m"}),
        ("m --max_model_len -1", {"--model": "m", "--max_model_len": "-1"}),
        ("m -O3", {"--model": "m", "--optimization-level": "3"}),
        ("m -O 2", {"--model": "m", "--optimization-level": "2"}),
        ("--no-enable-prefix-caching", {"--enable-prefix-caching": "false"}),
        ("--disable-prefix-caching", {"--enable-prefix-caching": "false"}),
        ("--enable-log-stats", {"--disable-log-stats": "false"}),
        ("--lora-modules a=b c=d --port 1", {"--lora-modules": ["a=b", "c=d"], "--port": "1"}),
        ("-sc.method ngram -sc.num_speculative_tokens=4", {
            "--speculative-config": '{"method": "ngram", "num_speculative_tokens": 4}'
        }),
        ("-cc.cudagraph_capture_sizes+ 1,2", {
            "--compilation-config": '{"cudagraph_capture_sizes": ["1", "2"]}'
        }),
        ("--hf-overrides.rope.factor 2.5", {"--hf-overrides": '{"rope": {"factor": 2.5}}'}),
    ],
)  # fmt: skip
def test_spellings(line: str, value: dict[str, Any]) -> None:
    assert read(line) == value


@pytest.mark.parametrize("line", ["m n", "vllm serve m --port", "m --unknown 1"])
def test_what_cannot_be_read_is_refused(line: str) -> None:
    with pytest.raises(ConfigError):
        configured(line)


@pytest.mark.observes("vllm:--config")
def test_the_command_line_overrides_its_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: a\nhost: 127.0.0.1\nmax_model_len: 8K\nspeculative-config: null\n")
    given = read(f"vllm serve b --config {file} --port 6379")
    assert given == {
        "host": "127.0.0.1",
        "max_model_len": "8K",
        "speculative-config": None,
        "--model": "b",
        "--port": "6379",
    }
    assert configured(f"--config {file}").model.context_length == 8192


@given(
    st.fixed_dictionaries(
        {"--model": st.sampled_from(["m", "/models/a b"])},
        optional={
            "--max-model-len": st.integers(1, 9999),
            "--enable-prefix-caching": st.booleans(),
            "--lora-modules": st.just(["a=/a", "b=/b"]),
            "--hf-overrides": st.just({"rope_theta": 1.0}),
            "--kv-cache-dtype": st.sampled_from(["auto", "fp8"]),
        },
    )
)
def test_what_is_written_is_read_back(values: dict[str, Any]) -> None:
    again = read(shlex.join(command_line(values)))
    dialect = DIALECTS["vllm"]
    assert translate(dialect, again).args == translate(dialect, values).args


def test_options_are_the_same_whether_the_launcher_is_there() -> None:
    tail = ["m", "-tp", "2", "--no-async-scheduling"]
    assert options(["vllm", "serve", *tail], Faults()) == options(tail, Faults())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--max-model-len auto", {}),
        ("--max-model-len 1.5k", {"model.context_length": 1500}),
        ("--num-gpu-blocks-override 10", {"engine.kv_tokens": 160}),
        ("--num-gpu-blocks-override 10 --block-size 32", {
            "engine.kv_tokens": 320, "engine.page_size": 32,
        }),
        ("--gpu-memory-utilization 0.5", {"engine.total_mem_fraction": 0.5}),
        ("--gpu-memory-utilization 0.5 --kv-cache-memory-bytes 1G", {"engine.kv_memory": 2**30}),
        ("--max-num-seqs 8 --max-num-active-seqs 4", {"engine.max_running_requests": 4}),
        ("--enforce-eager --max-cudagraph-capture-size 8", {
            "engine.graph_max_rows": 0, "engine.graph_prompt_tokens": 0,
        }),
        ("-O0", {"engine.graph_max_rows": 0, "engine.graph_prompt_tokens": 0}),
        ("-O3", {}),
        ("--scheduling-policy priority", {
            "engine.use_priorities": True, "engine.low_priority_first": True,
        }),
        ("--runner pooling", {"model.task": "embed"}),
        ("--runner pooling --convert classify", {"model.task": "classify"}),
        ("--generation-config vllm --override-generation-config.temperature 0.5", {
            "sampling.temperature": 0.5, "sampling.top_k": 0, "sampling.top_p": 1.0,
            "sampling.min_p": 0.0, "sampling.repetition_penalty": 1.0,
        }),
        ("--override-generation-config.top_k -1", {"sampling.top_k": 0}),
        ("--attention-backend FLASH_ATTN -ac.flash_attn_version 3", {
            "engine.attention_backend": "fa3",
        }),
        ("--attention-backend FLASHINFER", {"engine.attention_backend": "flashinfer"}),
        ("-cc.cudagraph_mode NONE", {
            "engine.graph_max_rows": 0, "engine.graph_prompt_tokens": 0,
        }),
        ("-cc 3", {}),
        ("--quantization gguf", {"model.load_format": "gguf"}),
        ("--quantization int8_per_channel_weight_only", {"model.quantization": "int8"}),
        ("-q awq_marlin", {"model.checkpoint_formats": ["awq"]}),
        ("""--allowed-origins '["https://a.b"]' --allow-credentials""", {
            "api.cors": {"origins": ["https://a.b"], "credentials": True},
        }),
        ("--allow-credentials", {}),
        ("--disable-uvicorn-access-log --uvicorn-log-level info", {
            "metrics.access_log_level": "WARNING",
        }),
        ("--structured-outputs-config.disable_any_whitespace true", {"grammar.json_compact": True}),
        ("-sc.method ngram -sc.prompt_lookup_max 4", {
            "speculation.method": "ngram",
            "speculation.longest_suffix": 4, "speculation.shortest_suffix": 4,
        }),
        ("-sc.model d/eagle3-head -sc.num_speculative_tokens 3", {
            "speculation.method": "eagle", "speculation.draft_model": "d/eagle3-head",
            "speculation.max_drafts": 3,
        }),
        ("--spec-model d --spec-tokens 5", {
            "speculation.method": "draft", "speculation.draft_model": "d",
            "speculation.max_drafts": 5,
        }),
        ("--spec-method mtp --spec-tokens 2", {
            "speculation.method": "mtp", "speculation.max_drafts": 2,
        }),
        ("--kv-events-config.enable_kv_cache_events true", {
            "engine.kv_events_endpoint": "tcp://*:5557",
        }),
        ("--watchdog-config.timeout 5", {}),
        ("""--allowed-origins '["*"]' --allowed-methods '["GET"]'""", {
            "api.cors": {"origins": ["*"], "methods": ["GET"]},
        }),
        ("org/name --revision v2 --tokenizer org/words --tokenizer-revision v3", {
            "model.path": "org/name@v2", "model.tokenizer_path": "org/words@v3",
        }),
        ("org/name --tokenizer-revision v3", {
            "model.path": "org/name", "model.tokenizer_path": "org/name@v3",
        }),
        ("--fingerprint-mode custom --fingerprint-value r7", {"api.system_fingerprint": "r7"}),
        ("--fingerprint-value r7", {}),
        ("--fingerprint-mode custom", {}),
        ("--enable-log-requests --enable-log-outputs --max-log-len 50", {
            "metrics.log_requests": "sampling", "metrics.log_responses": "clipped",
            "metrics.log_clip_chars": 50,
        }),
        ("--disable-access-log-for-endpoints /health,/metrics", {
            "metrics.access_log_skip": ["/health", "/metrics"],
        }),
        (f"--hf-config-path {OTHER} --hf-overrides.rope_theta 2", {
            "model.config_overrides": {"rope_theta": 2, "max_position_embeddings": 4096},
        }),
        ("--sse-keep-alive-interval 0", {"limits.keep_alive_s": None}),
        ("--performance-mode throughput --max-num-seqs 8", {
            "engine.max_running_requests": 8, "engine.max_step_tokens": 16_384,
        }),
        ("--rope-theta 2 --hf-overrides.a 1", {
            "model.config_overrides": {"rope_theta": 2.0, "a": 1},
        }),
    ],
)  # fmt: skip
def test_values_that_depend_on_others(line: str, expected: dict[str, Any]) -> None:
    assert settings(line) == expected


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--api-key sk-1", "secrets must not be in a configuration"),
        ("/model --revision v2", "only OWNER/NAME has revisions"),
        ("--hf-config-path /none", "/none/config.json cannot be read"),
        ("--hf-token hf_1", "set the variable HF_TOKEN"),
        ("--served-model-name a b", "several names of a model; give a"),
        ("--enable-expert-parallel -dp 2", "use --tensor-parallel-size"),
        ("--data-parallel-size-local 2 -dp 4", "Ray places replicas"),
        ("--attention-backend FLEX_ATTENTION", "supported: TRITON_ATTN"),
        ("--kv-cache-dtype nvfp4", "K and V in this format"),
        ("--spec-tokens 3", "name a method or a model"),
        ("--spec-method medusa", "must be one of"),
        ("--spec-method eagle", "needs model"),
        ("-sc.method ngram -sc.tree 1", "tree: not offered"),
        ("-cc.unknown 1", "unknown: not offered"),
        ("--numa-bind", "--numa-bind-nodes"),
        ("--enable-log-outputs", "needs --enable-log-requests"),
        ("--max-num-seqs 4 --max-num-active-seqs 8", "must not be above --max-num-seqs"),
        ("""--chat-template '{{ messages }}'""", "write the template into a file"),
        ("--tool-call-parser step3", "the chat template decides"),
        ("--logging-config.formatter json", "formatter: not offered"),
    ],
)
def test_refusals_say_what_to_do(line: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(line)
    assert says in str(caught.value)
    assert "sk-1" not in str(caught.value)


def test_a_secret_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        settings("--hf-token hf_secret")
    assert "hf_secret" not in str(caught.value)


def test_parsers_are_ones_that_exist() -> None:
    assert {*TOOL_NAMES.values()} <= {*tool_parser_names()}
    assert {*REASONING_NAMES.values()} <= {*reasoning_parser_names()}


def test_a_configuration_of_another_server_becomes_a_command() -> None:
    line = "--model-path m --tp 2 --max-running-requests 8 --speculative-algorithm NGRAM"
    ours = settings_of(
        translate(DIALECTS["sglang"], read_command_line("sglang", shlex.split(line), {})).args
    )
    text = written(DIALECTS["vllm"], convert(DIALECTS["vllm"], ours).values)
    assert text.startswith("vllm serve m --")
    again = configured(text)
    assert (again.parallel.tp_size, again.engine.max_running_requests) == (2, 8)
    assert again.speculation.method == "ngram"
