"""vLLM's arguments: the command line of `vllm serve`, and the YAML file of `--config`."""

from __future__ import annotations

from collections.abc import Mapping

from remora.configs.dialects import offload
from remora.configs.dialects.dialect import Dialect
from remora.configs.dialects.rules import Rule, Sets
from remora.configs.dialects.sglang_values import CONFIG_FILE
from remora.configs.dialects.shared_rules import (
    DTYPE,
    LOADER,
    TRUST_CODE,
    named_at,
    revision_of,
)
from remora.configs.dialects.vllm import (
    drafts,
    engine_values,
    json_options,
    model_values,
    refusals,
    values,
)
from remora.configs.dialects.vllm.parsers import REASONING, TOOLS

_SECONDS = "the time in which all ranks must load and connect"

HTTP: Mapping[str, Rule] = {
    "--config": CONFIG_FILE,
    "--host": Sets(key="http.host"),
    "--port": Sets(key="http.port"),
    "--root-path": Sets(key="http.root_path", unset={"": "it is empty"}),
    "--ssl-certfile": Sets(key="http.ssl_certfile"),
    "--ssl-keyfile": Sets(key="http.ssl_keyfile"),
    "--ssl-ca-certs": values.AUTHORITIES,
    "--ssl-cert-reqs": values.CLIENT_CERTIFICATES,
    "--api-key": values.KEYS,
    "--allowed-origins": values.cors("origins"),
    "--allowed-methods": values.cors("methods"),
    "--allowed-headers": values.cors("headers"),
    "--allow-credentials": values.cors("credentials"),
    "--h11-max-incomplete-event-size": values.MAX_HEADER_BYTES,
    "--h11-max-header-count": Sets(key="limits.max_headers"),
    "--uvicorn-log-level": values.ACCESS,
    "--disable-uvicorn-access-log": Sets(
        key=values.ACCESS_LEVEL,
        table={True: "WARNING"},
        strict=True,
        unset={False: "the access log is on"},
    ),
    "--disable-access-log-for-endpoints": values.SKIPPED_PATHS,
    "--sse-keep-alive-interval": Sets(key="limits.keep_alive_s", table={0: None}),
    "--fingerprint-mode": values.FINGERPRINT_MODE,
    "--fingerprint-value": values.FINGERPRINT_TEXT,
    "--enable-prompt-embeds": Sets(
        key="api.prompt_embeddings", how="of completions and /generate; chats take none"
    ),
    "--api-server-count": Sets(
        key="routing.num_gateways",
        how="processes of the gateway, if the configuration needs one; Serve's proxy, or HAProxy, "
        "accepts connections",
    ),
    "--chat-template": model_values.TEMPLATE,
    "--default-chat-template-kwargs": Sets(
        key="api.template_variables", how="also for the other chat APIs"
    ),
    "--reasoning-effort-map": Sets(key="api.reasoning_efforts"),
    "--tool-call-parser": TOOLS,
    "--reasoning-parser": REASONING,
    "--return-tokens-as-token-ids": Sets(key="api.tokens_as_ids"),
    "--enable-force-include-usage": Sets(
        key="api.stream_usage", table={True: "final", False: "on_request"}
    ),
    "--disable-fastapi-docs": Sets(key="api.docs", invert=True),
    "--enable-per-request-metrics": Sets(
        key="api.request_metrics",
        unset={False: "it is the default"},
        how="times are taken where answers are written; also acceptance of drafts",
    ),
    "--per-request-spec-decode-metrics": Sets(
        key="api.request_metrics",
        table={"summary": True},
        unset={"none": "it is the default"},
        refuse={"detailed": "not offered: acceptance step by step; summary works"},
        how="without the histogram of lengths; with times",
    ),
    "--enable-tokenizer-info-endpoint": Sets(key="api.tokenizer_info"),
    "--stream-interval": Sets(key="api.stream_interval_tokens"),
    "--max-logprobs": Sets(
        key="limits.max_top_logprobs",
        refuse={-1: "the whole vocabulary is never returned; at most 1024"},
    ),
    "--renderer-num-workers": Sets(
        key="api.tokenizer_threads",
        how="for prompts over 16 KiB; shorter ones are processed on the event loop",
    ),
    "--shutdown-timeout": values.SHUTDOWN,
}

MODEL: Mapping[str, Rule] = {
    "--model": named_at("model.path", "--revision"),
    "--served-model-name": model_values.NAMES,
    "--runner": model_values.RUNNER,
    "--convert": model_values.CONVERT,
    "--revision": revision_of("model.path", "--model"),
    "--tokenizer": named_at("model.tokenizer_path", "--tokenizer-revision"),
    "--tokenizer-revision": revision_of("model.tokenizer_path", "--tokenizer", "--model"),
    "--tokenizer-mode": Sets(
        key="model.tokenizer_loader",
        table={"auto": "auto", "hf": "transformers"},
        strict=True,
        otherwise="not offered: this tokenizer; the checkpoint's tokenizer.json gives the same ids",
    ),
    "--trust-remote-code": TRUST_CODE,
    "--dtype": DTYPE,
    "--seed": Sets(key="engine.random_seed"),
    "--max-model-len": model_values.LENGTH,
    "--quantization": model_values.QUANTIZATION,
    "--hf-overrides": model_values.CONFIG,
    "--hf-config-path": model_values.CONFIG_FOLDER,
    "--model-impl": Sets(
        key="model.impl",
        table={"auto": "auto", "vllm": "remora", "transformers": "transformers"},
        strict=True,
    ),
    "--skip-tokenizer-init": Sets(key="model.skip_tokenizer"),
    "--pooler-config": json_options.POOLER,
    "--generation-config": model_values.GENERATION,
    "--override-generation-config": model_values.OVERRIDES,
    "--enable-sleep-mode": Sets(
        key="engine.sleep_mode", how="on a CPU without adapters, draft models and draft heads"
    ),
    "--download-dir": Sets(key="model.download_dir"),
    "--load-format": model_values.LOAD_FORMAT,
    "--safetensors-load-strategy": model_values.STRATEGY,
    "--safetensors-prefetch-num-threads": model_values.PREFETCH,
    "--model-loader-extra-config": LOADER,
    "--enable-lora": values.LORA,
    "--lora-modules": values.MODULES,
    "--max-loras": Sets(key="lora.max_loras_per_batch", how="the base model takes no slot"),
    "--max-lora-rank": Sets(key="lora.max_lora_rank"),
    "--max-cpu-loras": Sets(key="lora.max_loaded_loras"),
    "--lora-target-modules": Sets(key="lora.target_modules"),
}

ENGINE: Mapping[str, Rule] = {
    "--block-size": Sets(key="engine.page_size"),
    "--gpu-memory-utilization": engine_values.SHARE,
    "--kv-cache-memory-bytes": Sets(key="engine.kv_memory"),
    "--num-gpu-blocks-override": engine_values.PAGES,
    "--kv-cache-dtype": engine_values.KV_DTYPE,
    "--kv-cache-dtype-skip-layers": engine_values.SKIPPED,
    "--enable-prefix-caching": Sets(key="engine.prefix_cache"),
    "--disable-hybrid-kv-cache-manager": Sets(
        key="engine.window_pages", table={True: "off", False: "auto"}
    ),
    "--max-num-batched-tokens": engine_values.STEP,
    "--max-num-scheduled-tokens": engine_values.PLANNED,
    "--max-num-seqs": engine_values.ROWS,
    "--max-num-active-seqs": engine_values.ACTIVE,
    "--max-num-queued-reqs": Sets(key="engine.max_queued_requests"),
    "--max-num-queued-tokens": Sets(key="engine.max_queued_tokens"),
    "--long-prefill-token-threshold": engine_values.CHUNK,
    "--performance-mode": engine_values.MODE,
    "--scheduling-policy": engine_values.POLICY,
    "--enable-chunked-prefill": Sets(key="engine.chunked_prefill"),
    "--watermark": Sets(key="engine.free_kv_fraction"),
    "--prefill-schedule-interval": Sets(
        key="engine.admission_interval_steps",
        how="steps between two admissions; prompts that have begun continue in each step",
    ),
    "--async-scheduling": Sets(key="engine.overlap"),
    "--enforce-eager": engine_values.EAGER,
    "--optimization-level": engine_values.LEVEL,
    "--cudagraph-capture-sizes": engine_values.graphs("engine.graph_rows"),
    "--max-cudagraph-capture-size": engine_values.graphs("engine.graph_max_rows"),
    "--compilation-config": json_options.COMPILATION,
    "--attention-backend": engine_values.BACKEND,
    "--attention-config": json_options.ATTENTION,
    "--structured-outputs-config": json_options.GRAMMAR,
    "--kv-events-config": json_options.EVENTS,
    **drafts.RULES,
    **offload.VLLM,
    "--tensor-parallel-size": Sets(key="parallel.tp_size"),
    "--pipeline-parallel-size": Sets(key="parallel.pp_size"),
    "--data-parallel-size": Sets(key="parallel.num_replicas", how="each is a Ray Serve replica"),
    "--master-port": Sets(key="parallel.rendezvous_port", how="for the ranks of one replica"),
    "--distributed-timeout-seconds": Sets(key="parallel.join_timeout_s", how=_SECONDS),
    "--cpu-distributed-timeout-seconds": Sets(key="parallel.join_timeout_s", how=_SECONDS),
    "--numa-bind-nodes": Sets(
        key="parallel.numa_nodes",
        how="the CPUs of a node; memory comes from it while there is room",
    ),
}

OBSERVING: Mapping[str, Rule] = {
    "--log-level": Sets(
        key="metrics.log_level",
        table={"CRITICAL": "ERROR", "NOTSET": "DEBUG"},
        hows={"CRITICAL": "ERROR, the highest level in use", "NOTSET": "DEBUG, the lowest"},
    ),
    "--log-config-file": Sets(key="metrics.log_config"),
    "--logging-config": json_options.LOGGING,
    "--enable-log-requests": values.LOG_REQUESTS,
    "--max-log-len": values.LOG_LENGTH,
    "--enable-log-outputs": values.LOG_OUTPUTS,
    "--disable-log-stats": values.NO_STATS,
    "--otlp-traces-endpoint": Sets(key="metrics.trace_endpoint"),
    "--custom-histogram-buckets": json_options.BUCKETS,
    "--enable-logging-iteration-details": Sets(key="debug.log_step_times"),
    "--profiler-config": json_options.PROFILER,
    "--watchdog-config": json_options.WATCHDOG,
}

# Arguments of older releases that set keys.
FORMER: Mapping[str, Rule] = {
    "--task": model_values.TASK,
    "--device": Sets(key="engine.device"),
    "--guided-decoding-backend": Sets(
        key="grammar.backend",
        table={"xgrammar": "xgrammar", "outlines": "outlines"},
        strict=True,
        unset=dict.fromkeys(("auto", "guidance"), "xgrammar supports the same constraints"),
    ),
    "--max-seq-len-to-capture": Sets(key="engine.graph_max_tokens"),
    "--rope-scaling": model_values.rope("rope_scaling"),
    "--rope-theta": model_values.rope("rope_theta"),
}

RULES: Mapping[str, Rule] = {**FORMER, **refusals.RULES, **HTTP, **MODEL, **ENGINE, **OBSERVING}

VLLM = Dialect(
    system="vllm",
    title="vLLM",
    rules=RULES,
    defaults={"http.host": "0.0.0.0", "http.port": 8000},
)
