"""The findings of `remora doctor model` and `remora plan` for embedding and scoring models.

Only headers of weight files are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts
from remora.configs.planning.kv_budget import human_bytes
from remora.configs.planning.pooling_plan import make_pooling_plan
from remora.configs.schema import ServeConfig
from remora.configs.sections.pooling import Task


def pooling_findings(
    config: ServeConfig, path: Path, task: Task, machine: MachineFacts
) -> Iterator[tuple[str, str]]:
    """Yield pairs of subject and text. Raises ConfigError if the model cannot be served."""
    from remora.engine.pooling.facts import read_pooling_facts
    from remora.engine.pooling.load import pooling_model_facts
    from remora.engine.weights.files import weight_files

    overrides = config.model.config_overrides
    facts = pooling_model_facts(path, overrides)
    yield "family", facts.architecture
    load_format = config.model.load_format
    if load_format != "dummy" and not weight_files(path, load_format):
        raise ConfigError(f"{path} holds no weights; is the download complete?")
    pooling = read_pooling_facts(
        path, task, config.pooling, hidden_size=facts.hidden_size, overrides=overrides
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
    yield "task", f"{task}, whole sequences without KV cache, by torch on {plan.device}"
    step = pooling.step_token
    yield "pooling", ", ".join(pooling.methods) if step is None else f"none, at each {step}"
    what = f"labels: {', '.join(pooling.labels)}" if pooling.labels else "dimensions"
    yield "output", f"{pooling.size} {what}"
    size = f"{(facts.num_parameters + pooling.num_parameters) / 1e6:,.1f} million parameters"
    yield "memory", f"{human_bytes(plan.weight_bytes)} of weights in {plan.dtype}, {size}"
    step_tokens = f"{plan.max_step_tokens:,} per step"
    yield "context", f"{plan.max_model_len:,} tokens per sequence, {step_tokens}"
