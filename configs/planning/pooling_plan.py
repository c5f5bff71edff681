"""Plans for embeddings and scores: the counterpart of `make_plan`, without a KV cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.planning.kv_budget import human_bytes
from remora.configs.planning.kv_format import DTYPE_BYTES
from remora.configs.planning.plan import (
    EnginePlan,
    common_fields,
    pick_context,
    pick_device,
    pick_dtype,
)
from remora.configs.schema import ServeConfig
from remora.configs.sections.pooling import Task

MAX_ROWS = 1024
MAX_QUEUED_ROWS = 8192  # one request is often hundreds of texts
STEP_TOKENS_EACH = 1024  # per thread; with fewer, whole rows do not divide evenly among threads
DEVICE_STEP_TOKENS = 16_384


def make_pooling_plan(
    config: ServeConfig,
    model: ModelFacts,
    machine: MachineFacts,
    model_path: Path,
    *,
    task: Task,
    max_tokens: int | None,
    head_parameters: int,
) -> EnginePlan:
    """Return the plan of a model for embeddings or scores. Raises ConfigError.

    max_tokens:       the checkpoint's limit for one text
    head_parameters:  of the layers after pooling, which are float32
    """
    _check_alone(config, task)
    engine = config.engine
    dtype, device = pick_dtype(config, model), pick_device(config, machine)
    weight_bytes = (
        model.num_parameters * DTYPE_BYTES[dtype] + head_parameters * DTYPE_BYTES["float32"]
    )
    if weight_bytes > machine.available_bytes:
        raise ConfigError(
            f"the weights take {human_bytes(weight_bytes)} in {dtype}, and "
            f"{human_bytes(machine.available_bytes)} of memory are available; set model.dtype to a "
            "smaller format, or free memory"
        )
    context = pick_context(config, model)
    if config.model.context_length is None and max_tokens is not None:
        context = min(context, max_tokens)
    num_threads = engine.num_threads or machine.num_cores
    usual_tokens = STEP_TOKENS_EACH * num_threads if device == "cpu" else DEVICE_STEP_TOKENS
    plan = EnginePlan(
        **common_fields(config, model_path),
        device=device,
        dtype=dtype,
        quantization="none",
        cpu_kernels="torch",
        num_threads=num_threads,
        num_pages=0,
        kv_bytes=0,
        weight_bytes=weight_bytes,
        max_model_len=context,
        max_running_requests=engine.max_running_requests or MAX_ROWS,
        max_step_tokens=engine.max_step_tokens or usual_tokens,
        prefill_chunk_tokens=context,
        max_queued_tokens=engine.max_queued_tokens,
        prefix_cache=False,
        conservativeness=1.0,
        priority_preemption_gap=None,
        task=task,
    )
    return with_queue(plan, config)


def with_queue(plan: EnginePlan, config: ServeConfig) -> EnginePlan:
    """Return the plan with the queue limits of a configuration."""
    engine = config.engine
    num_requests, num_tokens = engine.max_queued_requests, engine.max_queued_tokens
    if plan.task == "generate":
        num_tokens = num_tokens or 4 * plan.kv_tokens
    elif "max_queued_requests" not in engine.model_fields_set:
        num_requests = MAX_QUEUED_ROWS
    return replace(plan, max_queued_requests=num_requests, max_queued_tokens=num_tokens)


def _check_alone(config: ServeConfig, task: Task) -> None:
    """Raise ConfigError for keys that models for embeddings or scores do not support."""
    for is_set, key, fix in (
        (config.parallel.num_ranks > 1, "parallel.tp_size * pp_size > 1", "set both to 1"),
        (config.model.quantization != "none", "model.quantization", "set it to none"),
        (
            bool(config.model.quantization_overrides),
            "model.quantization_overrides",
            "leave it out",
        ),
        (config.engine.kv_dtype != "auto", "engine.kv_dtype", "leave it out; there is no KV cache"),
        (bool(config.lora.adapters) or config.lora.dynamic, "lora", "leave it out"),
        (config.speculation.method != "none", "speculation.method", "leave it out"),
        (config.model.impl == "transformers", "model.impl transformers", "set it to auto"),
        *((True, key, "leave it out") for key in config.live_weights_keys),
        (config.api.prompt_embeddings, "api.prompt_embeddings", "leave it out"),
        (config.offload.key is not None, str(config.offload.key), "leave it out"),
        (config.debug.tensor_dump_dir is not None, "debug.tensor_dump_dir", "leave it out"),
    ):
        if is_set:
            raise ConfigError(
                f"{key} is not available for embeddings and scores (model.task is {task}): {fix}"
            )
