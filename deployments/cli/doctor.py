"""`remora doctor`: what is here, what would be used, and what to mend first."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from remora.configs.schema import BUILTIN_MODEL
from remora.deployments.cli.terminal import EXIT_FAULT

_COLOURS = {"ok": "green", "warn": "yellow", "fix": "bold red"}


def doctor(
    model: Annotated[
        str, typer.Option(help="Model to plan for: folder, .gguf file or built-in name.")
    ] = BUILTIN_MODEL,
) -> None:
    """Report versions, devices and memory, and what would be used. Exit code 2 if it won't work."""
    from remora.deployments.cli import findings

    console = Console(highlight=False, soft_wrap=True)
    levels = set()
    for finding in findings.examine(model):
        levels.add(finding.level)
        mark = f"[{_COLOURS[finding.level]}]{finding.level:<4}[/]"
        console.print(f"{mark} {finding.subject:<13} {escape(finding.text)}")
    if findings.Level.FIX in levels:
        raise typer.Exit(EXIT_FAULT)
