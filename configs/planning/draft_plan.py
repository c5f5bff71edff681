"""The plan of a model together with its draft model or head, which shares its rows and pages.

Pure. A draft model is planned as a model by itself; then its weights, and its share of every page,
are taken from the memory of the model that it drafts for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.planning.kv_budget import NOTHING_RESERVED, Reserved
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.planning.plan import EnginePlan, make_plan, refit
from remora.configs.schema import ServeConfig
from remora.configs.sections.model import ModelSection
from remora.configs.sections.offload import OffloadSection
from remora.configs.sections.speculation import SpeculationSection

# Keys of the section `model` about reading files, which apply to a draft model, too.
_OF_BOTH = ("dtype", "trust_remote_code", "mmap", "load_threads", "verify_checksums")

_ONE_RANK = {
    "tp_size": 1,
    "pp_size": 1,
    "micro_batches": None,
    "num_nodes": 1,
    "symmetric_memory": False,
}


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """A draft model's files, and what they are."""

    path: Path
    model: ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """A draft head's files, and what it needs.

    weight_bytes:  with its copy of the target's embedding and output head, if it needs one
    token_bytes:   KV of one token
    state_bytes:   of what is kept of one token of a step, where torch computes
    captures:      layers of the target whose inputs it reads
    max_position:  longest sequence that it was trained for
    """

    path: Path
    weight_bytes: int
    token_bytes: int
    state_bytes: int
    captures: tuple[int, ...]
    max_position: int


def draft_config(config: ServeConfig) -> ServeConfig:
    """Return a configuration that would serve the draft model by itself, on one rank."""
    section = config.speculation
    assert section.draft_model is not None, "the section demands it"
    model = ModelSection(
        path=section.draft_model,
        quantization=section.draft_quantization,
        load_format="dummy" if config.model.load_format == "dummy" else "auto",
        **{key: getattr(config.model, key) for key in _OF_BOTH},
    )
    engine = config.engine.model_copy(
        update={
            "kv_dtype": "auto",
            "kv_scales_file": None,
            "kv_dtype_skip_layers": [],
            "window_pages": "off",
            "window_ratio": None,
            "window_saving": None,
        }
    )
    return config.model_copy(
        update={
            "model": model,
            "engine": engine,
            "parallel": config.parallel.model_copy(update=_ONE_RANK),
            "speculation": SpeculationSection(),
            "offload": OffloadSection(),
        }
    )


def plan_with_draft(
    config: ServeConfig,
    model: ModelFacts,
    machine: MachineFacts,
    path: Path,
    adapters: LoRASlotConfig | None = None,
    draft: DraftFacts | HeadFacts | None = None,
) -> EnginePlan:
    """Return what `make_plan` does, with room for the draft model or head, and a model's own plan.

    draft:  None = the configuration has no draft model
    Raises ConfigError.
    """
    if draft is None:
        return make_plan(config, model, machine, path, adapters)
    _check(config)
    if isinstance(draft, HeadFacts):
        _check_head(config, model, draft)
        room = Reserved(weight_bytes=draft.weight_bytes, token_bytes=draft.token_bytes)
        plan = make_plan(config, model, machine, path, adapters, room)
        return _limited(
            plan,
            draft.max_position,
            captures=draft.captures,
            head_bytes=draft.weight_bytes,
            head_token_bytes=draft.token_bytes,
            head_state_bytes=draft.state_bytes,
        )
    try:
        own = make_plan(draft_config(config), draft.model, machine, draft.path)
    except ConfigError as error:
        raise ConfigError(f"speculation.draft_model: {error}") from error
    _check_model(draft)
    reserved = Reserved(
        weight_bytes=own.weight_bytes,
        token_bytes=own.kv_bytes // ((own.num_pages + 1) * own.page_size),
    )
    plan = make_plan(config, model, machine, path, adapters, reserved)
    return _limited(_sharing_pages(plan, own, reserved.token_bytes), draft.model.max_position)


def refit_with_draft(
    plan: EnginePlan,
    config: ServeConfig,
    model: ModelFacts,
    *,
    free_bytes: int,
    total_bytes: int,
    step_bytes: int,
) -> EnginePlan:
    """Do what `refit` does, with room for its draft model or head, which is not loaded yet.

    step_bytes:  of the model; those of its draft model or head are assumed not to be more
    """
    own, reserved, spec = plan.draft, NOTHING_RESERVED, plan.speculation
    if spec is not None and spec.head_bytes:
        states = spec.state_bytes(plan.max_step_tokens, plan.max_running_requests)
        reserved = Reserved(
            weight_bytes=spec.head_bytes + states, token_bytes=spec.head_token_bytes
        )
        step_bytes *= 2
    if own is not None:
        token_bytes = own.kv_bytes // ((own.num_pages + 1) * own.page_size)
        reserved = Reserved(weight_bytes=own.weight_bytes, token_bytes=token_bytes)
        step_bytes *= 2
    plan = refit(
        plan,
        config,
        model,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        step_bytes=step_bytes,
        reserved=reserved,
    )
    return plan if own is None else _sharing_pages(plan, own, reserved.token_bytes)


def _sharing_pages(plan: EnginePlan, own: EnginePlan, token_bytes: int) -> EnginePlan:
    """Return the plan with a draft model whose rows and pages are the plan's.

    own:          of the draft model
    token_bytes:  of its KV
    """
    own = replace(
        own,
        num_pages=plan.num_pages,
        kv_bytes=token_bytes * plan.page_size * (plan.num_pages + 1),
        max_model_len=plan.max_model_len,
        max_running_requests=plan.max_running_requests,
        max_step_tokens=plan.max_step_tokens,
        num_threads=plan.num_threads,
        windows=None,
    )
    return replace(plan, draft=own)


def _limited(plan: EnginePlan, max_position: int, **fields: Any) -> EnginePlan:
    """Return the plan with further fields of speculation; drafts end where positions do."""
    assert plan.speculation is not None, "the section says how rows get drafts"
    longest = max_position if max_position < plan.max_model_len else None
    return replace(plan, speculation=replace(plan.speculation, max_tokens=longest, **fields))


def _check(config: ServeConfig) -> None:
    """Raise ConfigError for what does not work together with a draft model or head."""
    for key in config.live_weights_keys:
        raise ConfigError(
            f"{key} does not work together with speculation.method {config.speculation.method}, "
            "which would keep its weights and memory: leave one of them out"
        )


def check_target(config: ServeConfig, model: ModelFacts) -> None:
    """Raise ConfigError if no draft head can read the states of a model."""
    if model.implementation != "remora":
        raise ConfigError(
            f"speculation.method = {config.speculation.method}: a head reads states of remora's "
            f"own models, and {model.architecture} runs with transformers' code; use method ngram "
            "or draft"
        )


def _check_head(config: ServeConfig, model: ModelFacts, draft: HeadFacts) -> None:
    method = config.speculation.method
    check_target(config, model)
    if draft.captures and config.engine.compile:
        raise ConfigError(
            f"speculation.method = {method}: an EAGLE-3 head reads states between layers, which "
            "compiled steps do not keep; leave engine.compile out, or use method ngram or draft"
        )


def _check_model(draft: DraftFacts) -> None:
    if draft.model.implementation != "remora":
        raise ConfigError(
            f"speculation.draft_model: {draft.model.architecture} would run with transformers' "
            "code, which is slower than what it drafts for; use a model that remora implements "
            "(`remora doctor model`), or speculation.method ngram"
        )
