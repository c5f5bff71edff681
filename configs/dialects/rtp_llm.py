"""RTP-LLM's server arguments: its command line, and the equivalent environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.dialects import speculation
from remora.configs.dialects.dialect import Dialect
from remora.configs.dialects.rules import (
    UNSAID,
    Harmless,
    Means,
    Refusal,
    Rule,
    Sets,
    Settings,
)
from remora.configs.dialects.shared_rules import DTYPE, LOG_LEVEL, only_with

_CONCURRENCY = 32  # RTP-LLM's default
_FRAMES = 16
_LIMIT = "generation requests of each replica, each counted once however many outputs it has"
_WORLD = "--tp-size * --dp-size set the number of ranks; a value that differs is refused"


def _check_world(value: int, given: Mapping[str, Any]) -> Harmless:
    tp, dp = given.get("--tp-size") or 1, given.get("--dp-size") or 1
    if value != tp * dp:
        raise Refusal(f"--tp-size * --dp-size is {tp} * {dp} = {tp * dp}; make them agree")
    return Harmless(_WORLD)


def _to_budget(settings: Settings) -> Any:
    if settings.get("engine.chunked_prefill") is not True:
        return UNSAID
    return settings.get("engine.prefill_chunk_tokens", UNSAID)


def _of_fmha(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
    if value:
        return Harmless("attention is fused wherever a kernel supports it")
    return {"engine.attention_backend": "torch", "engine.cpu_kernels": "torch"}


def _to_fmha(settings: Settings) -> Any:
    both = (settings.get("engine.attention_backend"), settings.get("engine.cpu_kernels"))
    return False if both == ("torch", "torch") else UNSAID


def _of_tasks(value: Any, given: Mapping[str, Any]) -> Settings:
    if isinstance(value, list) and all(
        isinstance(each, Mapping) and each.keys() == {"task_id", "prompt"} for each in value
    ):
        return {"api.task_prompts": {str(each["task_id"]): each["prompt"] for each in value}}
    if isinstance(value, Mapping):
        return {"api.task_prompts": {str(name): text for name, text in value.items()}}
    raise Refusal('expected an object of names to texts, or a list of {"task_id", "prompt"}')


def _of_multi_block(value: bool, given: Mapping[str, Any]) -> Harmless | Settings:
    if value:
        return Harmless("attention always splits the keys of a sequence by their number")
    return {"engine.attention_splits": 1}


def _of_blocking(value: bool, given: Mapping[str, Any]) -> Harmless | Settings:
    if not value:
        return Harmless("requests over the limit are refused")
    limit = given.get("--concurrency-limit", _CONCURRENCY)
    return {"api.wait_when_busy": True, "api.max_concurrent_requests": limit}


def _of_stacks(value: bool, given: Mapping[str, Any]) -> Harmless | Settings:
    if not value or not given.get("--trace-memory"):
        return Harmless("no stacks are shown; they need --trace-memory too")
    return {"debug.trace_memory_frames": _FRAMES}


RULES: Mapping[str, Rule] = {
    **speculation.RTP_LLM,
    "--checkpoint-path": Sets(key="model.path"),
    "--tokenizer-path": Sets(key="model.tokenizer_path"),
    "--act-type": DTYPE,
    "--max-seq-len": Sets(key="model.context_length"),
    "--start-port": Sets(key="http.port"),
    "--tp-size": Sets(key="parallel.tp_size"),
    "--dp-size": Sets(key="parallel.num_replicas", how="each is a Ray Serve replica"),
    "--world-size": Means(keys=(), reads=_check_world, why=_WORLD),
    "--reuse-cache": Sets(key="engine.prefix_cache"),
    "--enable-fast-gen": Sets(key="engine.chunked_prefill"),
    "--fast-gen-context-budget": only_with(
        "--enable-fast-gen", "engine.prefill_chunk_tokens", _to_budget
    ),
    "--max-context-batch-size": Sets(key="engine.max_prefill_requests"),
    "--scheduler-reserve-resource-ratio": Sets(
        key="engine.free_kv_fraction", scale=0.01, how="of the KV cache, while requests run"
    ),
    "--device-reserve-memory-bytes": Sets(
        key="engine.memory_reserve", unset={0: "no memory is reserved"}
    ),
    "--concurrency-limit": Sets(key="api.max_concurrent_requests", how=_LIMIT),
    "--concurrency-with-block": Means(
        keys=("api.wait_when_busy", "api.max_concurrent_requests"),
        reads=_of_blocking,
        how=f"for up to engine.queue_timeout_s; {_LIMIT}",
    ),
    "--ft-core-dump-on-exception": Sets(key="debug.core_dump"),
    "--torch-cuda-profiler-dir": Sets(key="debug.profile_dir", unset={"": "nothing is profiled"}),
    "--gen-timeline-sync": Means(
        keys=("debug.profile_dir",),
        reads=lambda value, given: (
            {"debug.profile_dir": given.get("--torch-cuda-profiler-dir") or "."}
            if value
            else Harmless("nothing is profiled")
        ),
        writes=lambda settings: "debug.profile_dir" in settings or UNSAID,
        how="a torch profiler trace, between /start_profile and /stop_profile",
    ),
    "--trace-memory": Means(
        keys=("debug.trace_memory_s",),
        reads=lambda value, given: (
            {"debug.trace_memory_s": 60.0} if value else Harmless("memory is not traced")
        ),
        writes=lambda settings: "debug.trace_memory_s" in settings or UNSAID,
        how="logs the Python source lines whose memory has grown, every minute",
    ),
    "--trace-malloc-stack": Means(
        keys=("debug.trace_memory_frames",),
        reads=_of_stacks,
        writes=lambda settings: settings.get("debug.trace_memory_frames", 1) > 1 or UNSAID,
    ),
    "--multi-task-prompt": Sets(key="api.task_prompts_file"),
    "--multi-task-prompt-str": Means(
        keys=("api.task_prompts",),
        reads=_of_tasks,
        writes=lambda settings: settings.get("api.task_prompts") or UNSAID,
    ),
    "--py-inference-log-response": Sets(
        key="metrics.log_responses", table={True: "full", False: "none"}
    ),
    "--ft-alog-conf-path": Sets(
        key="metrics.log_config", how="a Python logging.config file, not an alog file"
    ),
    "--step-records-max-size": Sets(key="metrics.max_step_records"),
    "--step-records-time-range": Sets(key="metrics.step_records_s", scale=1e-6),
    "--max-batch-size": Sets(
        key="engine.max_running_requests",
        unset={0: "engine.max_running_requests keeps its default"},
    ),
    "--enable-fmha": Means(
        keys=("engine.attention_backend", "engine.cpu_kernels"), reads=_of_fmha, writes=_to_fmha
    ),
    "--enable-multi-block-mode": Means(
        keys=("engine.attention_splits",),
        reads=_of_multi_block,
        writes=lambda settings: False if settings.get("engine.attention_splits") == 1 else UNSAID,
    ),
    "--log-level": LOG_LEVEL,
    "--max-lora-model-size": Sets(
        key="lora.max_adapter_bytes", unset={-1: "no limit is set"}, how="in bytes of the file"
    ),
    "--load-balance": Sets(
        key="routing.policy",
        table={True: "power_of_two", False: "round_robin"},
        strict=True,
        how="the less busy of two random replicas",
    ),
    "--rank-factor": Sets(
        key="routing.policy",
        table={0: "shortest_queue", 1: "power_of_two"},
        strict=True,
        how="0: fewest tokens to compute; 1: the less busy of two random replicas",
    ),
}

RTP_LLM = Dialect(
    system="rtp_llm",
    title="RTP-LLM",
    rules=RULES,
    defaults={"http.host": "0.0.0.0", "http.port": 8088},
)
