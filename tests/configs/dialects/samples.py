"""Values of foreign parameters that are not their defaults, from the catalogues alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remora.configs.dialects.catalogue import Parameter

_DRAFTING = "optimisations.speculative_decoding"

# Where no value can be made from the type: texts in some form, and lists of them.
SAMPLES: dict[tuple[str, str], Any] = {
    ("sglang", "--log-level"): "debug",
    ("sglang", "--revision"): "main",
    ("sglang", "--speculative-ngram-min-match-window-size"): 2,
    ("sglang", "--log-level-http"): "warning",
    ("sglang", "--lora-paths"): ["a=/adapters/a", "b=/adapters/b"],
    ("sglang", "--lora-target-modules"): ["q_proj"],
    ("sglang", "--torchao-config"): "int8wo",
    ("sglang", "--page-size"): 32,
    ("sglang", "--prompt-tokens-buckets"): ["tse", "1000", "2", "8"],
    ("sglang", "--generation-tokens-buckets"): ["custom", "10", "100"],
    ("sglang", "--tokenizer-metrics-allowed-custom-labels"): ["team"],
    ("lightllm", "--grouping_key"): ["team=search"],
    ("lightllm", "--metric_gateway"): "http://gateway:9091",
    ("lightllm", "--mode"): ["triton_int8kv"],
    ("lightllm", "--quant_cfg"): str(Path(__file__).with_name("quant_cfg.yaml")),
    ("sglang", "--quantization"): "gptq",
    ("sglang", "--api-key"): "env:KEY",
    ("sglang", "--admin-api-key"): "file:/key",
    ("sglang", "--constrained-json-whitespace-pattern"): "[ ]?",
    ("rtp_llm", "--step-records-time-range"): 5_000_000,
    ("rtp_llm", "--world-size"): 1,
    ("sglang", "--preferred-sampling-params"): {"temperature": 0.5, "max_new_tokens": 7},
    ("sglang", "--warmups"): "sample,chat",
    ("sglang", "--model-loader-extra-config"): {
        "enable_multithread_load": True,
        "num_threads": 4,
    },
    ("sglang", "--kv-events-config"): {"publisher": "zmq", "endpoint": "tcp://*:5557"},
    ("sglang", "--triton-attention-split-tile-size"): 64,
    ("rtp_llm", "--multi-task-prompt-str"): {"greet": "You greet."},
    ("sglang", "--nccl-port"): 29500,
    ("sglang", "--numa-node"): [1],
    ("sglang", "--offload-group-size"): 4,
    ("backend", "warmups.sample_input_data"): ["a prompt"],
    ("backend", "loras"): [{"id": "a", "path": "/adapters/a"}],
    ("backend", "optimisations.attention_caching.type"): "radix",
    ("backend", "backend.version"): "latest",
    ("backend", "backend.extra_params"): {"context_length": 100},
    ("backend", "model_type"): "llm",
    ("backend", "lora_repo.type"): "s3",
    ("backend", "optimisations.model_type"): "llm",
    ("backend", "type"): "llm",
    ("backend", "optimisations.attention_caching.extra_params"): {},
}
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 4}
_SCALING = "deployment_config.autoscaling_config."
SAMPLES |= {
    ("vllm", name): value
    for name, value in {
        "--api-key": ["env:KEY"],
        "--allowed-origins": ["https://chat.example.com"],
        "--allowed-headers": ["authorization"],
        "--served-model-name": ["name"],
        "--lora-modules": ["a=/adapters/a"],
        "--lora-target-modules": ["q_proj"],
        "--max-lora-rank": 32,
        "--block-size": 32,
        "--kv-cache-dtype-skip-layers": ["1"],
        "--override-generation-config": {"temperature": 0.5},
        "--generation-config": "vllm",
        "--model-loader-extra-config": {"enable_multithread_load": True, "num_threads": 4},
        "--pooler-config": {"pooling_type": "CLS"},
        "--hf-overrides": {"rope_theta": 1e6},
        "--default-chat-template-kwargs": {"enable_thinking": False},
        "--compilation-config": {"cudagraph_capture_sizes": [1, 2]},
        "--attention-config": {"flash_attn_version": 3},
        "--structured-outputs-config": {"backend": "outlines"},
        "--logging-config": {"log_level": "DEBUG"},
        "--custom-histogram-buckets": {"request_latency": [1.0, 2.0]},
        "--kv-events-config": {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"},
        "--profiler-config": {"profiler": "torch", "torch_profiler_dir": "/traces"},
        "--watchdog-config": {"dump_dir": "/dumps", "timeout": 100},
        "--speculative-config": _DRAFTS,
        "--max-num-seqs": 32,
        "--max-num-batched-tokens": 4096,
        "--tool-call-parser": "hermes",
        "--reasoning-parser": "qwen3",
        "--master-port": 29_500,
        "--gpu-memory-utilization": 0.5,
        "--h11-max-incomplete-event-size": 16_384,
        "--h11-max-header-count": 128,
        "--optimization-level": "0",
        "--ssl-cert-reqs": 2,
        "--allowed-methods": ["GET"],
        "--disable-access-log-for-endpoints": "/health,/metrics",
        "--fingerprint-mode": "none",
        "--fingerprint-value": "release-7",
        "--revision": "main",
        "--tokenizer-revision": "main",
        "--performance-mode": "throughput",
        "--hf-config-path": str(Path(__file__).with_name("other_model")),
        "--reasoning-effort-map": {"minimal": "low"},
    }.items()
}
SAMPLES |= {
    ("ray_serve_llm", name): value
    for name, value in {
        "model_loading_config.model_source": "/other",
        "llm_engine": "vLLM",
        "accelerator_type": "H100",
        "placement_group_config.bundle_per_worker": {"CPU": 2, "GPU": 1},
        "placement_group_config.bundles": [{"CPU": 2, "GPU": 1}],
        "lora_config.dynamic_lora_loading_path": "s3://bucket/adapters",
        "deployment_config.num_replicas": "3",
        "deployment_config.ray_actor_options": {"num_cpus": 2},
        "deployment_config.logging_config": {"log_level": "DEBUG"},
        "deployment_config.request_router_config": {
            "request_router_class": "ray.serve.llm.request_router.PrefixCacheAffinityRouter"
        },
        "ingress_deployment_config": {"num_replicas": 2},
        "runtime_env": {"env_vars": {"VLLM_USE_V1": "1"}},
        f"{_SCALING}min_replicas": 2,
        f"{_SCALING}look_back_period_s": 20.0,
    }.items()
}
# Parameters that count only beside others.
COMPANIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("sglang", "--revision"): {"--model-path": "org/name"},
    ("sglang", "--log-requests-level"): {"--log-requests": True},
    ("sglang", "--priority-scheduling-preemption-threshold"): {
        "--enable-priority-scheduling": True
    },
    ("sglang", "--schedule-low-priority-values-first"): {"--enable-priority-scheduling": True},
    ("sglang", "--constrained-json-whitespace-pattern"): {"--grammar-backend": "outlines"},
    ("sglang", "--dynamic-batch-tokenizer-batch-size"): {"--enable-dynamic-batch-tokenizer": True},
    ("sglang", "--tokenizer-metrics-custom-labels-header"): {
        "--tokenizer-metrics-allowed-custom-labels": ["team"]
    },
    **{
        ("lightllm", name): {"--metric_gateway": "http://gateway:9091"}
        for name in ("--job_name", "--push_interval", "--grouping_key", "--enable_monitor_auth")
    },
    ("sglang", "--quantization-param-path"): {"--kv-cache-dtype": "fp8_e4m3"},
    ("sglang", "--torch-compile-max-bs"): {"--enable-torch-compile": True},
    ("backend", "backend.extra_params.torch_compile_max_bs"): {
        "backend.extra_params.enable_torch_compile": True
    },
    ("lightllm", "--router_max_new_token_len"): {"--router_token_ratio": 0.5},
    ("sglang", "--otlp-traces-endpoint"): {"--enable-trace": True},
    ("sglang", "--nccl-port"): {"--tensor-parallel-size": 2},
    ("sglang", "--nnodes"): {"--tensor-parallel-size": 6},
    ("lightllm", "--nnodes"): {"--tp": 6},
    ("sglang", "--dist-timeout"): {"--tensor-parallel-size": 2},
    ("sglang", "--enable-torch-symm-mem"): {"--tensor-parallel-size": 2},
    ("sglang", "--debug-tensor-dump-input-file"): {"--debug-tensor-dump-output-folder": "/dump"},
    ("lightllm", "--nccl_port"): {"--tp": 2},
    ("rtp_llm", "--trace-malloc-stack"): {"--trace-memory": True},
    ("rtp_llm", "--fast-gen-context-budget"): {"--enable-fast-gen": True},
    ("backend", "lora_repo.path"): {"load_lora_dynamic": True},
    ("backend", "lora_repo.type"): {"load_lora_dynamic": True, "lora_repo.path": "bucket/a"},
    **{
        ("sglang", name): {"--speculative-algorithm": "NGRAM"}
        for name in (
            "--speculative-num-draft-tokens",
            "--speculative-ngram-min-match-window-size",
            "--speculative-ngram-max-match-window-size",
            "--speculative-ngram-capacity",
        )
    },
    ("sglang", "--speculative-draft-model-path"): {"--speculative-algorithm": "EAGLE"},
    ("sglang", "--speculative-num-steps"): {"--speculative-algorithm": "NEXTN"},
    ("lightllm", "--mtp_step"): {"--mtp_mode": "deepseekv3"},
    ("rtp_llm", "--gen-num-per-cycle"): {"--sp-type": "mtp"},
    **{
        ("backend", f"{_DRAFTING}.extra_params.{name}"): {
            f"{_DRAFTING}.enabled": True,
            f"{_DRAFTING}.extra_params.algorithm": "eagle",
            f"{_DRAFTING}.extra_params.draft_model_path": "/head",
        }
        for name in ("algorithm", "draft_model_path", "num_steps")
    },
    ("backend", f"{_DRAFTING}.enabled"): {f"{_DRAFTING}.extra_params.algorithm": "n-gram"},
    ("backend", f"{_DRAFTING}.extra_params.num_draft_tokens"): {
        f"{_DRAFTING}.enabled": True,
        f"{_DRAFTING}.extra_params.algorithm": "n-gram",
    },
}

_VLLM: dict[str, dict[str, Any]] = {
    "--allowed-headers": {"--allowed-origins": ["https://chat.example.com"]},
    "--allow-credentials": {"--allowed-origins": ["https://chat.example.com"]},
    "--allowed-methods": {"--allowed-origins": ["https://chat.example.com"]},
    "--ssl-ca-certs": {"--ssl-cert-reqs": 2},
    "--ssl-cert-reqs": {"--ssl-ca-certs": "/authorities.pem"},
    "--fingerprint-value": {"--fingerprint-mode": "custom"},
    "--revision": {"--model": "org/name"},
    "--tokenizer-revision": {"--model": "org/name"},
    "--max-log-len": {"--enable-log-requests": True, "--enable-log-outputs": True},
    "--enable-log-outputs": {"--enable-log-requests": True},
    "--safetensors-prefetch-num-threads": {"--safetensors-load-strategy": "prefetch"},
    "--max-num-active-seqs": {"--max-num-seqs": 64},
    "--spec-method": {"--spec-model": "/draft"},
    "--spec-tokens": {"--spec-method": "ngram"},
    "--nnodes": {"--tensor-parallel-size": 6},
    "--master-port": {"--tensor-parallel-size": 2},
    "--numa-bind-nodes": {"--tensor-parallel-size": 1},
    "--distributed-timeout-seconds": {"--tensor-parallel-size": 2},
    "--cpu-distributed-timeout-seconds": {"--tensor-parallel-size": 2},
}
COMPANIONS |= {("vllm", name): given for name, given in _VLLM.items()}
COMPANIONS |= {
    (system, name): {"--offload-group-size": 8}
    for system in ("sglang", "vllm")
    for name in ("--offload-num-in-group", "--offload-prefetch-step")
}
COMPANIONS[("ray_serve_llm", "placement_group_config.strategy")] = {
    "engine_kwargs.tensor_parallel_size": 2
}
COMPANIONS |= {
    ("ray_serve_llm", f"{_SCALING}{name}"): {f"{_SCALING}max_replicas": 8}
    for name in (
        "min_replicas",
        "initial_replicas",
        "target_ongoing_requests",
        "look_back_period_s",
        "upscale_delay_s",
        "downscale_delay_s",
        "downscale_to_zero_delay_s",
    )
}


def values(parameter: Parameter) -> list[Any]:
    """Return values that are not the default, the likeliest to be taken first."""
    own = SAMPLES.get((parameter.system, parameter.name))
    if own is not None:
        return [own]
    if parameter.choices and not parameter.type.startswith("list"):
        others = [c for c in parameter.choices if c not in (None, parameter.default)]
        return [*others, *([parameter.default] if parameter.default is not None else [])]
    return _of_type(parameter.type, parameter.default)


def _of_type(kind: str, default: Any) -> list[Any]:
    if kind.startswith("list["):
        return [_of_type(kind[5:-1], None)[:1]]
    if kind == "bool":
        return [not default, bool(default)]
    if kind in ("int", "count"):
        return [3 if default in (None, 0, 1, -1) else default + 1, 16, 1]
    if kind == "float":
        return [0.5 if default != 0.5 else 0.25, 2.0]
    if kind in ("json", "any"):
        return [{"some": "value"}]
    return ["/some/path" if kind == "path" else "something"]
