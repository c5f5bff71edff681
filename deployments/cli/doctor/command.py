"""`remora doctor`: check the installation, the machine and a model, and say what to fix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from remora.configs.schema import BUILTIN_MODEL
from remora.deployments.cli.options import Settings, read_overrides
from remora.deployments.cli.target import read_models
from remora.deployments.cli.terminal import EXIT_FAULT, Commands

if TYPE_CHECKING:
    from remora.deployments.cli.doctor.findings import Finding

_COLOURS = {"ok": "green", "warn": "yellow", "fix": "bold red"}

app = typer.Typer(cls=Commands, invoke_without_command=True)


@app.callback()
def doctor(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="Model to plan for: folder, .gguf file or built-in name.")
    ] = BUILTIN_MODEL,
) -> None:
    """Check versions, devices, memory and a model's plan. Exit code 2 if serving would fail."""
    if context.invoked_subcommand is not None:
        return
    from remora.deployments.cli.doctor import findings

    _show(findings.examine(model))


@app.command("model")
def doctor_model(
    target: Annotated[
        str, typer.Argument(help="Model folder, .gguf file, built-in name or Serve config file.")
    ],
    settings: Settings = None,
) -> None:
    """Show how a model would be served: implementation, kernels, parsers, chat template, memory.

    Loads no weights. Exit code 2 if the model cannot be served.
    """
    from remora.deployments.cli.doctor.model import examine_model
    from remora.engine.launch import read_machine
    from remora.engine.models.locate import locate_model

    for model in read_models([target], None, read_overrides(settings)).values():
        path = locate_model(model.config.model, with_weights=False)
        _show(examine_model(model.config, path, read_machine(model.config)))


def _show(found: Iterable[Finding]) -> None:
    """Print each finding. Raises typer.Exit with EXIT_FAULT if one must be fixed."""
    console = Console(highlight=False, soft_wrap=True)
    levels = set()
    for finding in found:
        levels.add(str(finding.level))
        mark = f"[{_COLOURS[finding.level]}]{finding.level:<4}[/]"
        console.print(f"{mark} {escape(f'{finding.subject:<14}')} {escape(finding.text)}")
    if "fix" in levels:
        raise typer.Exit(EXIT_FAULT)
