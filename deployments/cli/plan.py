"""`remora plan`: compute the memory use of a configuration without loading the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from remora.deployments.cli.options import Dialect, Settings, Targets, read_overrides, read_size
from remora.deployments.cli.target import read_models
from remora.deployments.cli.terminal import answer

_SIZES = tuple(size * 2**30 for size in (8, 24, 80))


def plan(
    target: Targets = None,
    dialect: Dialect = None,
    settings: Settings = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Device memory to plan for, e.g. 80GiB. Default: this machine's."),
    ] = None,
) -> None:
    """Show the memory of weights, KV cache and steps, and how many requests fit."""
    from remora.configs.planning.draft_plan import DraftFacts, plan_with_draft
    from remora.configs.planning.loading import Loading
    from remora.configs.planning.memory_report import lines, report
    from remora.deployments.cli.doctor.pooling import pooling_findings
    from remora.engine.launch import read_machine
    from remora.engine.models.facts import read_model_facts
    from remora.engine.models.locate import locate_model
    from remora.engine.pooling.facts import pooling_task
    from remora.engine.spec.build import read_draft_facts

    for model in read_models(target or (), dialect, read_overrides(settings)).values():
        config = model.config
        path = locate_model(config.model, with_weights=False)
        machine = read_machine(config)
        if memory is not None:
            size = read_size(memory, "--memory")
            devices = ("cuda:0", "cpu") if config.engine.device == "cuda" else machine.devices
            machine = replace(machine, available_bytes=size, total_bytes=size, devices=devices)
        task = pooling_task(path, config.model.task, config.model.config_overrides)
        if task is not None:
            for subject, text in pooling_findings(config, path, task, machine):
                answer(f"{subject:<10} {text}")
            continue
        facts = read_model_facts(path, Loading.of(config.model))
        draft = read_draft_facts(config, facts)
        planned = plan_with_draft(config, facts, machine, path, draft=draft)
        is_native = (
            planned.device == "cpu" and planned.cpu_kernels != "torch" and planned.num_ranks == 1
        )
        drafts = draft.model if isinstance(draft, DraftFacts) else None
        found = report(planned, facts, drafts, is_native=is_native)
        for line in lines(found, planned, _SIZES):
            answer(line)
