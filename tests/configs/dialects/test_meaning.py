"""Values whose translation depends on defaults or on other parameters."""

from __future__ import annotations

import re
from typing import Any

import pytest

from remora.configs.dialects import sglang_values
from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.catalogue import System
from remora.configs.dialects.convert import settings_of
from remora.configs.dialects.coverage import coverage
from remora.configs.dialects.translate import State, Translation, translate
from remora.configs.errors import ConfigError


def of(system: System, given: dict[str, Any]) -> Translation:
    return translate(DIALECTS[system], given)


ON = {"--enable-priority-scheduling": True}
THRESHOLD = {"--priority-scheduling-preemption-threshold": 3}
GAP = "engine.priority_preemption_gap"
FORMATS = "model.checkpoint_formats"
NODES = {"--nnodes": 2, "--tp": 4, "--moe-dense-tp-size": 4, "--dist-init-addr": "a:1"}
SCALES = {"--quantization-param-path": "s.json"}
CHUNK = {"--chunked_prefill_size": 4096}
GROUPS = {
    "--offload-group-size": 4,
    "--offload-num-in-group": 2,
    "--offload-prefetch-step": 3,
}
BACKEND = "engine.attention_backend"
FLASHINFER = ("--enable_flashinfer_prefill", "--enable_flashinfer_decode")


def loader(**said: Any) -> dict[str, Any]:
    return {"--model-loader-extra-config": said}


@pytest.mark.parametrize(
    ("system", "given", "key", "value"),
    [
        ("sglang", ON, GAP, 9),
        ("sglang", ON | THRESHOLD, GAP, 2),
        ("sglang", THRESHOLD, GAP, None),  # counts only with the switch
        ("sglang", {"--enable-priority-scheduling": False}, GAP, None),
        ("sglang", loader(), "model.load_threads", None),
        ("sglang", loader(enable_multithread_load=False), "model.load_threads", 1),
        ("sglang", loader(enable_multithread_load=True), "model.load_threads", 8),
        ("sglang", loader(enable_multithread_load=True, num_threads=3), "model.load_threads", 3),
        ("sglang", NODES, "parallel.num_nodes", 2),
        ("sglang", NODES, "parallel.tp_size", 4),
        ("sglang", {"--attention-backend": "fa4"}, BACKEND, "fa4"),
        ("sglang", {"--decode-attention-backend": "flashinfer"}, BACKEND, "flashinfer"),
        ("sglang", {"--attention-backend": "torch_native"}, BACKEND, "torch"),
        ("lightllm", {"--enable_fa3": True}, BACKEND, "fa3"),
        ("lightllm", dict.fromkeys(FLASHINFER, True), BACKEND, "flashinfer"),
        ("lightllm", {FLASHINFER[1]: True}, BACKEND, "flashinfer"),
        ("lightllm", dict.fromkeys(FLASHINFER, False), BACKEND, None),
        ("sglang", {"--kv-cache-dtype": "fp8_e5m2"}, "engine.kv_dtype", "fp8_e5m2"),
        ("sglang", {"--kv-cache-dtype": "bf16"}, "engine.kv_dtype", "bfloat16"),
        ("sglang", {"--kv-cache-dtype": "bfloat16"}, "engine.kv_dtype", "bfloat16"),
        ("sglang", {"--quantization": "modelopt_fp8"}, FORMATS, ["modelopt"]),
        ("sglang", {"--quantization": "gptq_marlin"}, FORMATS, ["gptq"]),
        ("sglang", {"--quantization": "w8a8_fp8"}, FORMATS, ["compressed-tensors", "fp8"]),
        ("sglang", {"--quantization": "gguf"}, "model.load_format", "gguf"),
        ("sglang", SCALES | {"--kv-cache-dtype": "fp8_e4m3"}, "engine.kv_scales_file", "s.json"),
        ("sglang", SCALES | {"--kv-cache-dtype": "fp8_e5m2"}, "engine.kv_scales_file", None),
        ("sglang", SCALES, "engine.kv_scales_file", None),
        ("lightllm", {"--mode": ["ppl_int8kv"]}, "engine.kv_dtype", "int8"),
        (
            "lightllm",
            {"--mode": ["triton_gqa_attention", "triton_int8kv"]},
            "engine.kv_dtype",
            "int8",
        ),
        ("lightllm", {"--mode": ["triton_flashdecoding"]}, "engine.kv_dtype", None),
        ("sglang", {"--cpu-offload-gb": 2}, "offload.host_memory", 2 * 2**30),
        ("sglang", {"--cpu-offload-gb": 0}, "offload.host_memory", None),
        ("vllm", {"--cpu-offload-gb": 0.5}, "offload.host_memory", 2**29),
        ("sglang", {"--offload-group-size": -1}, "offload.group_size", None),
        ("sglang", GROUPS, "offload.group_size", 4),
        ("vllm", GROUPS, "offload.num_in_group", 2),
        ("sglang", {"--offload-num-in-group": 2}, "offload.num_in_group", None),
        ("vllm", GROUPS, "offload.prefetch_layers", 3),
        ("vllm", {"--offload-prefetch-step": 3}, "offload.prefetch_layers", None),
        ("lightllm", CHUNK, "engine.prefill_chunk_tokens", 4096),
        (
            "lightllm",
            CHUNK | {"--disable_chunked_prefill": True},
            "engine.prefill_chunk_tokens",
            None,
        ),
    ],
)
def test_values_that_depend_on_others(
    system: System, given: dict[str, Any], key: str, value: int | str | None
) -> None:
    assert settings_of(of(system, given).args).get(key) == value


@pytest.mark.parametrize(
    ("system", "given", "message"),
    [
        (
            "sglang",
            {"--prefill-attention-backend": "fa3", "--decode-attention-backend": "triton"},
            "two attention backends in one engine; set all to one of triton, torch_native, flash",
        ),
        (
            "lightllm",
            {"--enable_fa3": True, **dict.fromkeys(FLASHINFER, True)},
            "--enable_fa3 selects another backend",
        ),
    ],
)
def test_one_attention_backend_serves_both_phases(
    system: System, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        of(system, given)


@pytest.mark.parametrize(
    ("system", "given", "message"),
    [
        ("sglang", GROUPS | {"--cpu-offload-gb": 1}, "--offload-group-size is set too"),
        ("sglang", {"--offload-mode": "sharded_gpu"}, "supported: cpu"),
        ("vllm", {"--offload-params": ["experts"]}, "those of a layer are there together"),
    ],
)
def test_offloading_in_other_ways_is_refused_by_name(
    system: System, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        of(system, given)


def test_k_and_v_in_4_bits_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="K and V in 4 bits; set it to fp8_e4m3"):
        of("sglang", {"--kv-cache-dtype": "fp4_e2m1"})


def test_each_attention_backend_of_sglang_is_ours_or_refused_by_name() -> None:
    choices = DIALECTS["sglang"].parameters["--attention-backend"].choices
    assert choices is not None
    assert {*sglang_values.ATTENTION, *sglang_values.NO_ATTENTION} == {*choices}


@pytest.mark.parametrize(
    ("system", "tokens", "share"),
    [
        ("sglang", "--max-total-tokens", "--mem-fraction-static"),
        ("lightllm", "--max_total_token_num", "--mem_fraction"),
        (
            "backend",
            "backend.extra_params.max_total_tokens",
            "backend.extra_params.gpu_memory_utilization",
        ),
    ],
)
def test_a_number_of_tokens_decides_alone(system: System, tokens: str, share: str) -> None:
    both = of(system, {share: 0.8, tokens: 5000})
    assert settings_of(both.args).get("engine.kv_tokens") == 5000
    assert "engine.total_mem_fraction" not in settings_of(both.args)
    assert both.lines[0].text == f"{tokens} sets the size of the KV cache"
    assert settings_of(of(system, {share: 0.8}).args)["engine.total_mem_fraction"] == 0.8


@pytest.mark.parametrize(
    ("system", "name", "value", "state", "text"),
    [
        ("sglang", "--dtype", "auto", State.APPROXIMATE, "the checkpoint's own"),
        ("sglang", "--dtype", "half", State.EXACT, ""),
        ("sglang", "--log-level", "critical", State.APPROXIMATE, "ERROR, the highest"),
        ("sglang", "--log-level", "error", State.EXACT, ""),
        ("sglang", "--load-balance-method", "shortest_queue", State.APPROXIMATE, "by tokens"),
        ("sglang", "--load-balance-method", "minimum_tokens", State.EXACT, ""),
        ("sglang", "--disable-hybrid-swa-memory", True, State.EXACT, ""),
        ("sglang", "--swa-full-tokens-ratio", 0.8, State.APPROXIMATE, "refused"),
        ("sglang", "--disable-outlines-disk-cache", True, State.NO_EFFECT, "in memory only"),
        ("sglang", "--enable-torch-compile", True, State.APPROXIMATE, "decode steps"),
        ("sglang", "--torch-compile-max-bs", 8, State.NO_EFFECT, "without --enable-torch-compile"),
        ("sglang", "--torchao-config", "int4wo-128", State.APPROXIMATE, "groups of 32"),
        ("sglang", "--torchao-config", "fp8wo", State.APPROXIMATE, "on a GPU only"),
        ("lightllm", "--quant_type", "ao-int4wo-128", State.APPROXIMATE, "groups of 32"),
        ("lightllm", "--quant_type", "ao-w8a8", State.APPROXIMATE, "groups of 32"),
        ("lightllm", "--quant_type", "none", State.EXACT, ""),
        ("backend", "quantization", "float16", State.EXACT, ""),
        ("rtp_llm", "--enable-comm-overlap", False, State.NO_EFFECT, "same outputs"),
        ("rtp_llm", "--max-batch-size", 0, State.NO_EFFECT, "keeps its default"),
        ("sglang", "--model-path", "/model", State.EXACT, ""),
        ("sglang", "--model-path", "Qwen/Qwen3-8B", State.EXACT, ""),
        ("sglang", "--nnodes", 2, State.EXACT, ""),
        ("lightllm", "--nnodes", 2, State.EXACT, ""),
        ("sglang", "--node-rank", 0, State.NO_EFFECT, "Ray places ranks"),
        ("sglang", "--dist-init-addr", "host:5000", State.NO_EFFECT, "rank 0's node"),
        ("lightllm", "--nccl_host", "10.0.0.1", State.NO_EFFECT, "rank 0's node"),
        ("lightllm", "--multinode_router_gloo_port", 30, State.NO_EFFECT, "Ray connects"),
        ("sglang", "--enable-multimodal", True, State.NO_EFFECT, "with images get HTTP 400"),
        ("sglang", "--enable-triton-kernel-moe", True, State.NO_EFFECT, "same outputs"),
        ("sglang", "--moe-dense-tp-size", 1, State.NO_EFFECT, "alike"),
        ("sglang", "--tokenizer-mode", "auto", State.NO_EFFECT, "always used"),
        ("lightllm", "--tokenizer_mode", "fast", State.NO_EFFECT, "always used"),
        ("sglang", "--tokenizer-worker-num", 4, State.APPROXIMATE, "over 16 KiB"),
        ("sglang", "--max-prefill-tokens", 512, State.APPROXIMATE, "below the context length"),
        ("rtp_llm", "--world-size", 1, State.NO_EFFECT, "--tp-size * --dp-size"),
        ("rtp_llm", "--concurrency-limit", 8, State.APPROXIMATE, "of each replica"),
        ("rtp_llm", "--concurrency-with-block", True, State.APPROXIMATE, "queue_timeout_s"),
    ],
)
def test_state_and_note_of_single_values(
    system: System, name: str, value: Any, state: State, text: str
) -> None:
    (line,) = of(system, {name: value}).lines
    assert line.state is state
    assert text in line.text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("--node-rank", 1, "join the other nodes with `ray start`"),
        ("--enable-ep-moe", True, "expert parallelism"),
        ("--moe-dense-tp-size", 2, "parallel.tp_size divides dense"),
        ("--tokenizer-mode", "slow", "tokenizers in Python"),
        ("--quantization", "marlin", "in the order of Marlin's kernels"),
        ("--torchao-config", "int4wo-100", "expected one of int8wo"),
        ("--torchao-config", "fp8dq-per_tensor", "makes a row depend on others"),
        ("--quantization", "qoq", "in the order of QServe's kernels"),
        ("--prompt-tokens-buckets", "tse 1000 2 5000", "COUNT 1 to 256"),
        ("--prompt-tokens-buckets", "tse 1000 2 inf", "COUNT 1 to 256"),
        ("--prompt-tokens-buckets", "tse 1000 0.5 8", "BASE above 1"),
        ("--generation-tokens-buckets", "tse 10 1e300 8", "edges would exceed 1e+12"),
        ("--tbo-token-distribution-threshold", 0.3, "overlapping compute and communication"),
        ("--enable-profile-cuda-graph", True, "profile steps with debug.profile_dir"),
    ],
)
def test_why_single_values_are_refused(name: str, value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        of("sglang", {name: value})


def test_notes_on_the_page_name_their_values() -> None:
    rows = {row.name: row for row in coverage(("sglang",))}
    assert "llguidance: not offered" in rows["--grammar-backend"].reason
    assert "xpu, hpu, npu: remora runs on cuda and cpu" in rows["--device"].reason
    assert rows["--load-balance-method"].state is State.APPROXIMATE
