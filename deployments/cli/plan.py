"""`remora plan`: what a configuration takes of the memory, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from remora.configs.fields import Bytes
from remora.configs.value_sources import of_environment, of_options
from remora.deployments.cli.target import read_models
from remora.deployments.cli.terminal import Failure, answer

_SIZES = tuple(size * 2**30 for size in (8, 24, 80))


def plan(
    target: Annotated[
        list[str] | None,
        typer.Argument(
            help="Serve config file, model folder or .gguf file; with --dialect its options."
        ),
    ] = None,
    dialect: Annotated[
        str | None,
        typer.Option(help="Whose options follow behind --: sglang, lightllm, rtp_llm, backend."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A key's value: --set engine.page_size=32.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of the device to plan for, such as 80GiB; default: this one's."),
    ] = None,
) -> None:
    """Say what weights, KV cache and steps take, and how many requests fit; loads nothing."""
    from remora.configs.environment import cache_dir
    from remora.configs.planning.loading import Loading
    from remora.configs.planning.memory_report import lines, report
    from remora.configs.planning.plan import make_plan
    from remora.deployments.cli.doctor.pooling import pooling_findings
    from remora.engine.launch import read_machine
    from remora.engine.models.facts import read_model_facts
    from remora.engine.pooling.facts import pooling_task
    from remora.engine.weights.resolve_model import resolve_model

    overrides = [*of_environment(os.environ), *of_options(settings or ())]
    for model in read_models(target or (), dialect, overrides).values():
        config = model.config
        path = resolve_model(config.model.path, cache_dir())
        machine = read_machine(config)
        if memory is not None:
            size = _size(memory)
            devices = ("cuda:0", "cpu") if config.engine.device == "cuda" else machine.devices
            machine = replace(machine, available_bytes=size, total_bytes=size, devices=devices)
        task = pooling_task(path, config.model.task, config.model.config_overrides)
        if task is not None:
            for subject, text in pooling_findings(config, path, task, machine):
                answer(f"{subject:<10} {text}")
            continue
        facts = read_model_facts(path, Loading.of(config.model))
        planned = make_plan(config, facts, machine, path)
        is_native = planned.device == "cpu" and _runs_native(planned.cpu_kernels, planned.num_ranks)
        for line in lines(report(planned, facts, is_native=is_native), planned, _SIZES):
            answer(line)


def _runs_native(cpu_kernels: str, num_ranks: int) -> bool:
    return cpu_kernels != "torch" and num_ranks == 1


def _size(text: str) -> int:
    try:
        return TypeAdapter[int](Bytes).validate_python(text)
    except ValidationError:
        raise Failure(f"--memory {text}: expected a size such as 24GiB") from None
