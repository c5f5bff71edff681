"""Build a pooling engine from a configuration; `engine/launch.py` does so for generation.

Knows no Ray and no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.machine import read_machine_facts
from remora.configs.planning.plan import EnginePlan
from remora.configs.planning.pooling_plan import make_pooling_plan
from remora.configs.schema import ServeConfig
from remora.configs.sections.pooling import Task
from remora.engine.observe.inspection import Inspection
from remora.engine.parallel.numa import bind_rank
from remora.engine.pooling.engine import PoolingEngine
from remora.engine.pooling.facts import YES_NO, PoolingFacts, read_pooling_facts
from remora.engine.pooling.load import load_pooling_model, pooling_model_facts
from remora.engine.pooling.row import Row
from remora.engine.tokens.configured import configured_tokenizer
from remora.engine.tokens.tokenizer import Tokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPooling:
    """A pooling engine and its facts; the fields are those of BuiltEngine."""

    engine: PoolingEngine
    tokenizer: Tokenizer
    plan: EnginePlan
    facts: ModelFacts
    machine: MachineFacts
    pooling: PoolingFacts
    phases: dict[str, float]
    kernels: str
    torch_threads: int
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
    inspection: Inspection = field(default_factory=Inspection)
    adapters: None = None
    new_weights: None = None


def build_pooling(
    config: ServeConfig, path: Path, task: Task, *, show_progress: bool = True
) -> BuiltPooling:
    """Load the model and build its engine. Raises ConfigError."""
    started = time.perf_counter()
    overrides = config.model.config_overrides
    facts = pooling_model_facts(path, overrides)
    pooling = read_pooling_facts(
        path, task, config.pooling, hidden_size=facts.hidden_size, overrides=overrides
    )
    machine = read_machine_facts(
        devices=(*(f"cuda:{n}" for n in range(torch.cuda.device_count())), "cpu")
    )
    plan = make_pooling_plan(
        config,
        facts,
        machine,
        path,
        task=task,
        max_tokens=pooling.max_tokens,
        head_parameters=pooling.num_parameters,
    )
    tokenizer = configured_tokenizer(config.model, path, vocab_size=facts.vocab_size)
    if pooling.step_token is not None:
        step_id = _token(tokenizer, "step_token", pooling.step_token)
        pooling = replace(pooling, step_id=step_id)
    phases = {"read facts and tokenizer": time.perf_counter() - started}
    started = time.perf_counter()
    bind_rank(plan.numa_nodes, 0)
    torch.set_num_threads(plan.num_threads)
    model = load_pooling_model(
        path,
        pooling,
        dtype=DTYPES[plan.dtype],
        device=plan.device,
        load_format=plan.load_format,
        loading=plan.loading,
        yes_no=_yes_no(config, pooling, tokenizer),
        show_progress=show_progress,
    )
    phases["load weights"] = time.perf_counter() - started
    started = time.perf_counter()
    model([Row([0] * min(8, plan.max_model_len))])  # runs all first-time work
    phases["warm up kernels"] = time.perf_counter() - started
    return BuiltPooling(
        engine=PoolingEngine(plan, model, vocab_size=facts.vocab_size),
        tokenizer=tokenizer,
        plan=plan,
        facts=facts,
        machine=machine,
        pooling=pooling,
        phases=phases,
        kernels=f"torch on {plan.device}, whole rows without padding",
        torch_threads=plan.num_threads,
    )


def _yes_no(
    config: ServeConfig, pooling: PoolingFacts, tokenizer: Tokenizer
) -> tuple[int, int] | None:
    """Return the yes and no tokens of a generating reranker, or None. Raises ConfigError."""
    if not any(stage.name == YES_NO for stage in pooling.stages):
        return None
    section = config.pooling
    return (
        _token(tokenizer, "yes_token", section.yes_token),
        _token(tokenizer, "no_token", section.no_token),
    )


def _token(tokenizer: Tokenizer, key: str, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ConfigError(
            f"pooling.{key} is {text!r}, which is {len(ids)} tokens; it must be one token."
        )
    return ids[0]
