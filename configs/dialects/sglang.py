"""SGLang's server arguments: its command line, and the YAML file of `--config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.dialects import lora_entries, offload, speculation
from remora.configs.dialects import sglang_values as values
from remora.configs.dialects.dialect import Dialect
from remora.configs.dialects.rules import (
    UNSAID,
    Effect,
    Means,
    NoEffect,
    Refusal,
    Refused,
    Rule,
    Sets,
    Settings,
)
from remora.configs.dialects.shared_rules import (
    COMPILE,
    CRITICAL,
    DTYPE,
    LEVELS,
    LOADER,
    LOG_LEVEL,
    REASONING,
    TOKENIZER_MODE,
    TOOLS,
    TRUST_CODE,
    edges,
    memory_share,
    named_at,
    no_graphs,
    only_with,
    revision_of,
    secret,
)

_LOAD_FORMATS = {
    "auto": "auto",
    "safetensors": "safetensors",
    "gguf": "gguf",
    "pt": "pt",
    "dummy": "dummy",
    "layered": "auto",
    "bitsandbytes": "auto",
}
_KV_SCALES = "with a scale for each token and head, computed as they are stored"
_NO_KV_SCALES = f"without scales in the checkpoint or in --quantization-param-path, {_KV_SCALES}"
# The formats of checkpoints that values of --quantization mean; some name a kernel, too.
_FORMATS = {
    "awq": ["awq"],
    "awq_marlin": ["awq"],
    "gptq": ["gptq"],
    "gptq_marlin": ["gptq"],
    "moe_wna16": ["awq", "gptq"],
    "fp8": ["fp8"],
    "modelopt": ["modelopt"],
    "modelopt_fp8": ["modelopt"],
    "modelopt_fp4": ["modelopt"],
    "petit_nvfp4": ["modelopt"],
    "w8a8_int8": ["compressed-tensors"],
    "w8a8_fp8": ["compressed-tensors", "fp8"],
    "mxfp4": ["mxfp4"],
    "bitsandbytes": ["bitsandbytes"],
}
_UNQUANTISED = ("fp8", "w8a8_fp8", "w8a8_int8", "bitsandbytes")
_NOT_OFFERED = {
    "marlin": "not offered: weights in the order of Marlin's kernels; use the GPTQ checkpoint",
    "qoq": "not offered: weights in the order of QServe's kernels; supported: the original weights",
    "w4afp8": "not yet: int4 experts with 8-bit floats; use the original checkpoint",
}
_GGUF = "blocks that native CPU kernels know are computed as stored, others dequantised"


def _of_quantization(value: str, given: Mapping[str, Any]) -> Effect:
    """Name the checkpoint's format, which is compared with the checkpoint at start-up."""
    if value == "gguf":
        return Effect({"model.load_format": "gguf"}, _GGUF)
    if value not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise Refusal(_NOT_OFFERED.get(value, f"expected gguf or one of {known}"))
    how = (
        "a checkpoint in this format; others are refused, not rounded (--torchao-config rounds)"
        if value in _UNQUANTISED
        else ""
    )
    return Effect({"model.checkpoint_formats": _FORMATS[value]}, how)


def _to_quantization(settings: Settings) -> Any:
    if settings.get("model.load_format") == "gguf":
        return "gguf"
    wanted = settings.get("model.checkpoint_formats")
    return next((name for name, formats in _FORMATS.items() if formats == wanted), UNSAID)


_NOT_READ = {
    "npcache": "not offered: a cache of pickled weights; convert them to safetensors, which are "
    "memory-mapped",
    "sharded_state": "not offered: files per rank; with auto, each rank reads only its part of the "
    "files",
    "remote": "weights are read from local files; mount the store or copy the directory",
    "remote_instance": "weights are read from files, not from another server",
}
_BALANCING = {
    "round_robin": "round_robin",
    "shortest_queue": "shortest_queue",
    "minimum_tokens": "shortest_queue",
}

RULES: Mapping[str, Rule] = {
    "--config": values.CONFIG_FILE,
    # model
    "--model-path": named_at("model.path", "--revision"),
    "--revision": revision_of("model.path", "--model-path"),
    "--served-model-name": Sets(key="model.served_name"),
    "--dtype": DTYPE,
    "--model-impl": Sets(key="model.impl", table={"sglang": "remora"}),
    "--trust-remote-code": TRUST_CODE,
    "--download-dir": Sets(key="model.download_dir"),
    "--load-format": Sets(
        key="model.load_format",
        table=_LOAD_FORMATS,
        strict=True,
        hows={
            "auto": "does not fall back to pickled files; use pt for them",
            "layered": "every format is read tensor by tensor",
            "bitsandbytes": "checkpoints of bitsandbytes are recognised; others are not rounded",
        },
        refuse=_NOT_READ,
    ),
    "--context-length": Sets(key="model.context_length"),
    "--quantization": Means(
        keys=("model.checkpoint_formats", "model.load_format"),
        reads=_of_quantization,
        writes=_to_quantization,
    ),
    "--quantization-param-path": values.KV_SCALES,
    "--torchao-config": values.TORCHAO,
    "--json-model-override-args": Sets(key="model.config_overrides"),
    "--model-loader-extra-config": LOADER,
    "--weight-loader-disable-mmap": Sets(key="model.mmap", invert=True),
    "--delete-ckpt-after-loading": Sets(key="model.delete_after_load"),
    # HTTP
    "--host": Sets(key="http.host"),
    "--port": Sets(key="http.port"),
    "--stream-output": Sets(key="api.stream_text", table={True: "delta", False: "cumulative"}),
    "--reasoning-parser": REASONING,
    "--tool-call-parser": TOOLS,
    "--stream-interval": Sets(key="api.stream_interval_tokens"),
    "--allow-auto-truncate": Sets(key="api.prompt_truncation", table={True: "tail", False: "none"}),
    "--skip-server-warmup": Sets(key="warmup.enabled", invert=True),
    "--warmups": Means(
        keys=("warmup.routines",),
        reads=lambda value, given: {"warmup.routines": [n.strip() for n in value.split(",")]},
        writes=lambda settings: ",".join(settings.get("warmup.routines", ())) or UNSAID,
        how="remora's routines: generate, sample, logprobs, grammar, chat",
    ),
    # tokenizer
    "--chat-template": Sets(
        key="model.chat_template", how="a file, or the name of one of the checkpoint's templates"
    ),
    "--tokenizer-path": Sets(key="model.tokenizer_path"),
    "--tokenizer-mode": TOKENIZER_MODE,
    "--is-embedding": Sets(
        key="model.task",
        table={True: "embed"},
        strict=True,
        unset={False: "the checkpoint decides"},
        how="for generation models too; models with a score head need no flag",
    ),
    "--skip-tokenizer-init": Sets(key="model.skip_tokenizer"),
    "--tokenizer-worker-num": Sets(
        key="api.tokenizer_threads",
        how="threads of each replica, not processes, for prompts over 16 KiB; shorter ones are "
        "tokenised on the event loop",
    ),
    "--enable-tokenizer-batch-encode": NoEffect(
        "the prompts of a request are always tokenised together"
    ),
    "--enable-dynamic-batch-tokenizer": values.GATHERING,
    "--dynamic-batch-tokenizer-batch-size": values.GATHERED,
    "--dynamic-batch-tokenizer-batch-timeout": Sets(key="api.tokenizer_batch_wait_s"),
    # memory and scheduling
    "--mem-fraction-static": memory_share("--max-total-tokens"),
    "--radix-eviction-policy": Sets(key="engine.prefix_eviction"),
    "--kv-cache-dtype": Sets(
        key="engine.kv_dtype",
        table={"bf16": "bfloat16"},
        hows={
            "auto": "8 bits also if a checkpoint of compressed-tensors or ModelOpt declares them "
            "for K and V",
            "fp8_e4m3": _NO_KV_SCALES,
            "fp8_e5m2": _KV_SCALES,
        },
        refuse={"fp4_e2m1": "not offered: K and V in 4 bits; set it to fp8_e4m3"},
    ),
    "--page-size": Sets(key="engine.page_size"),
    "--max-total-tokens": Sets(key="engine.kv_tokens"),
    "--swa-full-tokens-ratio": Sets(
        key="engine.window_ratio", how="refused for models without sliding-window layers"
    ),
    "--hybrid-kvcache-ratio": Sets(
        key="engine.window_saving",
        how="1 = the window and the tokens of a step, per sequence of full length",
    ),
    "--disable-hybrid-swa-memory": Sets(
        key="engine.window_pages", table={True: "off", False: "auto"}
    ),
    "--chunked-prefill-size": values.CHUNK,
    "--max-prefill-tokens": Sets(
        key="engine.max_prefill_tokens",
        how="the limit of each step, also below the context length, where SGLang raises it to that",
    ),
    "--max-running-requests": Sets(key="engine.max_running_requests"),
    "--max-queued-requests": Sets(key="engine.max_queued_requests"),
    "--disable-radix-cache": Sets(key="engine.prefix_cache", invert=True),
    "--schedule-conservativeness": Sets(key="engine.schedule_conservativeness"),
    "--schedule-low-priority-values-first": Sets(key="engine.low_priority_first"),
    "--schedule-policy": values.POLICY,
    "--enable-priority-scheduling": values.PRIORITIES,
    "--priority-scheduling-preemption-threshold": values.THRESHOLD,
    "--enable-mixed-chunk": Sets(key="engine.mixed_steps"),
    "--num-continuous-decode-steps": Sets(key="engine.admission_interval_steps"),
    "--scheduler-recv-interval": Sets(key="engine.poll_interval_steps"),
    "--num-reserved-decode-tokens": Sets(key="engine.min_reserved_tokens"),
    "--disable-overlap-schedule": Sets(key="engine.overlap", invert=True),
    "--preferred-sampling-params": values.PREFERRED,
    "--enable-custom-logit-processor": Refused(
        "code that clients send is never run; list processors in engine.logit_processors, and "
        "requests select one by name"
    ),
    "--multi-item-scoring-delimiter": NoEffect("/v1/score always scores each item separately"),
    "--enable-fp32-lm-head": NoEffect(
        "logits are float32: native CPU kernels and CUDA do not round their sums; torch on a CPU "
        "or ROCm, engine.deterministic on a GPU and model.impl transformers round them to "
        "model.dtype first; a quantised head is multiplied in its own format"
    ),
    "--enable-return-hidden-states": Sets(
        key="api.hidden_states", how="on /generate, in the final event"
    ),
    "--custom-weight-loader": Sets(
        key="model.weight_loaders",
        how="functions that yield (name, tensor) pairs; see /update_weights_from_disk",
    ),
    "--enable-memory-saver": Sets(
        key="engine.sleep_mode",
        how="also /sleep and /wake_up; on a CPU without adapters, draft models and draft heads",
    ),
    "--weight-version": Sets(key="model.weight_version"),
    "--random-seed": Sets(key="engine.random_seed"),
    "--watchdog-timeout": Sets(key="engine.step_timeout_s", how="Ray Serve replaces the replica"),
    "--device": Sets(
        key="engine.device",
        refuse=dict.fromkeys(("xpu", "hpu", "npu"), "remora runs on cuda and cpu"),
    ),
    "--attention-backend": Sets(
        key="engine.attention_backend",
        table=values.ATTENTION,
        strict=True,
        refuse=values.NO_ATTENTION,
    ),
    "--prefill-attention-backend": values.PHASE,
    "--decode-attention-backend": values.PHASE,
    "--triton-attention-num-kv-splits": Sets(key="engine.attention_splits"),
    "--triton-attention-split-tile-size": Sets(key="engine.attention_split_tokens"),
    "--enable-deterministic-inference": Sets(key="engine.deterministic"),
    # graphs
    "--enable-torch-compile": COMPILE,
    "--torch-compile-max-bs": only_with("--enable-torch-compile", "engine.compile_max_rows"),
    "--disable-cuda-graph": no_graphs("--cuda-graph-max-bs"),
    "--cuda-graph-max-bs": Sets(key="engine.graph_max_rows"),
    "--cuda-graph-bs": Sets(key="engine.graph_rows"),
    "--disable-cuda-graph-padding": Sets(key="engine.graph_padding", invert=True),
    "--piecewise-cuda-graph-max-tokens": Sets(key="engine.graph_prompt_tokens"),
    "--enable-cudagraph-gc": Sets(key="engine.graph_gc"),
    # LoRA
    "--enable-lora": values.LORA,
    "--lora-paths": Means(
        keys=("lora.adapters", "lora.dynamic"),
        reads=lora_entries.of_texts,
        writes=lora_entries.to_texts,
    ),
    "--max-lora-rank": Sets(key="lora.max_lora_rank"),
    "--lora-target-modules": Sets(key="lora.target_modules"),
    "--max-loras-per-batch": Sets(
        key="lora.max_loras_per_batch", how="the base model takes no slot"
    ),
    "--max-loaded-loras": Sets(key="lora.max_loaded_loras"),
    "--lora-backend": NoEffect(
        "there is one set of adapter kernels for GPUs and one for CPUs; same outputs"
    ),
    "--lora-eviction-policy": Sets(key="lora.eviction"),
    # grammar
    "--grammar-backend": Sets(
        key="grammar.backend",
        refuse={"llguidance": "not offered; xgrammar supports the same constraints"},
    ),
    "--constrained-json-disable-any-whitespace": Sets(key="grammar.json_compact"),
    "--constrained-json-whitespace-pattern": Sets(key="grammar.json_whitespace_pattern"),
    **speculation.SGLANG,
    **offload.SGLANG,
    # parallel
    "--tensor-parallel-size": Sets(key="parallel.tp_size"),
    "--pipeline-parallel-size": Sets(key="parallel.pp_size"),
    "--data-parallel-size": Sets(key="parallel.num_replicas", how="each is a Ray Serve replica"),
    "--enable-torch-symm-mem": Sets(
        key="parallel.symmetric_memory", how="for sums of up to 256 KiB"
    ),
    "--dist-timeout": Sets(key="parallel.join_timeout_s"),
    "--nccl-port": Sets(key="parallel.rendezvous_port", how="for the ranks of one replica"),
    "--load-balance-method": Sets(
        key="routing.policy",
        table=_BALANCING,
        strict=True,
        hows={"shortest_queue": "by tokens to compute, not by requests"},
    ),
    "--load-watch-interval": Sets(key="routing.stats_period_s"),
    # logs
    "--log-level": LOG_LEVEL,
    "--log-level-http": Sets(key="metrics.access_log_level", table=LEVELS, hows=CRITICAL),
    "--log-requests": values.LOG_REQUESTS,
    "--log-requests-level": values.LOG_DETAIL,
    "--enable-request-time-stats-logging": Sets(key="metrics.log_request_times"),
    "--decode-log-interval": Sets(key="metrics.log_step_interval"),
    "--gc-warning-threshold-secs": Sets(
        key="metrics.log_gc_s", unset={0.0: "collections are not logged"}
    ),
    "--show-time-cost": Sets(key="debug.log_step_times", how="one line per step"),
    "--enable-trace": values.TRACE,
    "--otlp-traces-endpoint": only_with("--enable-trace", "metrics.trace_endpoint"),
    "--kv-events-config": values.KV_EVENTS,
    "--enable-nan-detection": NoEffect(
        "NaN and infinite logits are always detected, and end the affected request"
    ),
    "--crash-on-nan": Sets(key="debug.fail_on_nan"),
    "--debug-tensor-dump-output-folder": Means(
        keys=("debug.tensor_dump_dir", "engine.cpu_kernels", "engine.device"),
        reads=lambda value, given: {
            "debug.tensor_dump_dir": value,
            "engine.cpu_kernels": "torch",
            "engine.device": "cpu",
        },
        how="safetensors files; runs torch kernels on a CPU",
    ),
    "--debug-tensor-dump-input-file": Sets(
        key="debug.tensor_dump_input", how="a JSON list of token ids"
    ),
    "--crash-dump-folder": Sets(key="debug.crash_dump_dir"),
    # metrics
    "--enable-metrics-for-all-schedulers": Sets(key="metrics.per_rank"),
    "--enable-metrics": Sets(key="metrics.enabled"),
    "--bucket-time-to-first-token": Sets(key="metrics.first_token_buckets_s"),
    "--bucket-inter-token-latency": Sets(key="metrics.inter_token_buckets_s"),
    "--bucket-e2e-request-latency": Sets(key="metrics.request_buckets_s"),
    "--collect-tokens-histogram": Sets(key="metrics.token_histograms"),
    "--prompt-tokens-buckets": edges("metrics.prompt_token_buckets"),
    "--generation-tokens-buckets": edges("metrics.output_token_buckets"),
    "--tokenizer-metrics-custom-labels-header": Sets(key="metrics.request_labels_header"),
    "--tokenizer-metrics-allowed-custom-labels": Sets(key="metrics.request_labels"),
    "--api-key": secret("api.api_key"),
    "--admin-api-key": secret("api.admin_api_key"),
    "--file-storage-path": Sets(key="api.batch_dir"),
    "--sampling-defaults": NoEffect(
        "defaults come from the checkpoint's generation_config.json",
        only=("model",),
        otherwise="defaults come from the checkpoint; set others in the section sampling",
    ),
    "--enable-cache-report": NoEffect("the usage always includes cached tokens"),
}

SGLANG = Dialect(
    system="sglang",
    title="SGLang",
    rules=RULES,
    defaults={"http.host": "127.0.0.1", "http.port": 30000, "api.generate_dialect": "sglang"},
)
