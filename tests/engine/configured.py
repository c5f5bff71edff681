"""Engines over the fake model as a configuration says: from its keys to what runs in a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.load import parse_args
from remora.configs.planning.plan import EnginePlan, make_plan
from tests.engine.scheduler.scheduled import Harness

SMALL: dict[str, Any] = {
    "page_size": 4,
    "kv_tokens": 128,
    "max_running_requests": 4,
    "max_step_tokens": 16,
    "prefill_chunk_tokens": 8,
}
MODEL = ModelFacts(
    architecture="LlamaForCausalLM",
    num_layers=1,
    hidden_size=4,
    intermediate_size=4,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=50,
    max_position=128,
    dtype="float32",
    num_parameters=1000,
)
PAGE_BYTES = 2 * 4 * 4 * SMALL["page_size"]  # K and V of one head of 4 numbers
MACHINE = MachineFacts(
    num_cores=4,
    total_bytes=2**31,
    available_bytes=2**30,
    cpu_name="fake",
    cpu_features=(),
    devices=("cpu",),
)


def plan_for(
    *,
    without: tuple[str, ...] = (),
    max_position: int = 128,
    windows: tuple[int | None, ...] = (),
    **engine: Any,
) -> EnginePlan:
    """Make a small plan with these keys of the section engine, and not those of `without`.

    windows:  of the model's layers, instead of one layer without
    """
    keys = {key: value for key, value in (SMALL | engine).items() if key not in without}
    config = parse_args({"model": {"path": "fake"}, "engine": keys})
    num_layers = max(1, len(windows))
    model = replace(MODEL, max_position=max_position, windows=windows, num_layers=num_layers)
    return make_plan(config, model, MACHINE, Path("fake"))


def configured(
    *, without: tuple[str, ...] = (), windows: tuple[int | None, ...] = (), **engine: Any
) -> Harness:
    """Make a small engine with these keys of the section engine, and not those of `without`."""
    return Harness(made=plan_for(without=without, windows=windows, **engine))
